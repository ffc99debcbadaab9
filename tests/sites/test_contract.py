"""What `condition_` promises, on every model of the registry.

Models are tiny and random, without dropout. Enter new ones in tests/sites/models.py.
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wellcond as wc
from tests.sites.models import MODELS, Example
from wellcond.attach import find_known
from wellcond.hooks import token_hooks
from wellcond.sites import REGISTRY
from wellcond.sites.registry import class_paths

LEAKY = wc.ConditioningConfig(scope="sample", allow_leak=True)
BF16 = torch.finfo(torch.bfloat16).eps


def contract(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test once per model; a model that it makes no sense for is skipped with its reason."""
    return contract_of(lambda example: True)(test)


def contract_of(chosen: Callable[[Example], Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`contract` over a part of the models."""

    def parametrize(test: Callable[..., None]) -> Callable[..., None]:
        subject = test.__name__.removeprefix("test_")
        rows = []
        for name, example in MODELS.items():
            if not chosen(example):
                continue
            reason = example.not_for.get(subject)
            marks = [pytest.mark.skip(reason=reason)] if reason is not None else []
            rows.append(pytest.param(example, id=name, marks=marks))
        return pytest.mark.parametrize("example", rows)(test)

    return parametrize


def call(model: nn.Module, batch: Any) -> Any:
    torch.manual_seed(0)
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def tensors(output: Any) -> Iterator[Tensor]:
    """Every floating tensor in an output, whatever it is packed in."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        return list(tensors(call(model.eval(), batch)))


def same(a: list[Tensor], b: list[Tensor], tolerance: float = 0.0) -> bool:
    """Equal up to a share of the norm: heads of random models may be tiny, so absolute numbers say nothing."""
    assert len(a) == len(b)
    assert any(y.norm() > 0 for y in b)
    return all(
        x.shape == y.shape and (x - y).norm() <= tolerance * y.norm() for x, y in zip(a, b, strict=True)
    )


def differ(a: list[Tensor], b: list[Tensor]) -> bool:
    """By a part in a thousand of its norm, in one output at least."""
    return any(x.shape != y.shape or (x - y).norm() > 1e-3 * y.norm() for x, y in zip(a, b, strict=True))


def gradients(model: nn.Module, batch: Any, run: Callable[..., Any] = call) -> dict[str, Tensor]:
    model.train()
    model.zero_grad()
    loss = torch.zeros(())
    for output in tensors(run(model, batch)):
        loss = loss + (output * torch.linspace(-1, 1, output.numel()).view_as(output).cos()).mean()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Up to the order in which autograd adds up float32 numbers, 32 units in the last place of the norm.

    The bias of the keys has no gradient (softmax does not see a shift), so what autograd finds there is rounding: only
    that it is nothing beside the others can be asked of it.
    """
    assert a.keys() == b.keys()
    nothing = 1e-6 * max(grad.norm() for grad in a.values())
    assert nothing > 0
    limit = 32 * torch.finfo(torch.float32).eps
    different = [name for name in a if (a[name] - b[name]).norm() > limit * a[name].norm()]
    assert [name for name in different if max(a[name].norm(), b[name].norm()) > nothing] == []


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_every_registered_class_has_an_example():
    covered = set()
    for example in MODELS.values():
        for module in example.model().modules():
            covered |= set(class_paths(module))
    # FeatureHookNet and the detectors share the finder of a class that has an example.
    shared = {
        name
        for name, finder in REGISTRY.models.items()
        if finder in {REGISTRY.models[c] for c in covered & set(REGISTRY.models)}
    }
    assert set(REGISTRY.models) - covered - shared == set()


@pytest.mark.parametrize("placement", ["input", "tokens"])
@contract
def test_bound(example: Example, placement: str) -> None:
    """κ⁺ ≤ 2.002 for every sample, at either placement; where there are no positions the second is refused."""
    model, batch = example.model(), example.batch()
    config = wc.ConditioningConfig(scope="sample", allow_leak=True, placement=placement)
    if placement == "tokens" and find_known(model).sites.tokens is None:
        with pytest.raises(ValueError, match="placement='tokens'"):
            wc.condition_(model, config)
        assert not wc.is_conditioned(model)
        return
    plain = outputs(model, batch)
    wc.condition_(model, config)
    (hook,) = token_hooks(model)
    seen = []
    hook.transform.register_forward_hook(lambda module, args, y: seen.append((*args, y)))
    conditioned = outputs(model, batch)
    ((x, mask, y),) = seen
    assert wc.spectrum(y, mask).kappa_pinv.max() <= 2.002
    assert wc.spectrum(x, mask).kappa_pinv.max() > 2.002
    assert differ(plain, conditioned)


@contract
def test_state(example: Example) -> None:
    """No parameter, buffer or key more or less, and no value changed."""
    model = example.model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules, parameters = len(list(model.modules())), len(list(model.parameters()))
    wc.condition_(model)
    outputs(model, example.batch())
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert (len(list(model.modules())), len(list(model.parameters()))) == (modules, parameters)
    model.load_state_dict(before, strict=True)


@contract
def test_removal(example: Example) -> None:
    """remove() gives the model back, to the bit and to the hook."""
    model, batch = example.model(), example.batch()
    hooks, plain = hook_count(model), outputs(model, batch)
    with wc.condition_(model) as handle:
        assert wc.is_conditioned(model)
        assert differ(outputs(model, batch), plain)
        with pytest.raises(ValueError, match="already"):
            wc.condition_(model)
    assert not wc.is_conditioned(model)
    assert hook_count(model) == hooks
    assert same(outputs(model, batch), plain)
    handle.remove()


def through_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_file],
    ids=["deepcopy", "pickle", "torch.save"],
)
@contract
def test_copies(example: Example, duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """A copy is conditioned by itself: it neither calls the original nor shares its hooks."""
    model, batch = example.model(), example.batch()
    plain = outputs(model, batch)
    wc.condition_(model)
    conditioned = outputs(model, batch)
    twin = duplicate(model)
    assert wc.is_conditioned(twin)
    assert same(outputs(twin, batch), conditioned)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert same(outputs(twin, batch), conditioned)
    wc.remove_(twin)
    assert same(outputs(twin, batch), plain)
    assert wc.is_conditioned(model)


def with_library_checkpointing(model: nn.Module, reentrant: bool) -> bool:
    """Switch on what the library offers; False if it offers nothing."""
    for module in model.modules():
        if reentrant and type(module).__name__ == "Eva":
            return False  # timm passes Eva's blocks keywords, which reentrant checkpoints refuse
        for name in (
            "activation_checkpointing_enable",
            "gradient_checkpointing_enable",
        ):  # the new and the old
            if hasattr(module, name):
                getattr(module, name)({"use_reentrant": reentrant})
                return True
        if hasattr(module, "set_grad_checkpointing"):
            module.set_grad_checkpointing(True)
            return True
    return False


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad:UserWarning"
)  # a checkpoint inside one
@pytest.mark.parametrize("reentrant", [True, False])
@contract
def test_checkpointing(example: Example, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are those without checkpoints: blocks checkpointed by their library, or the model as a whole."""
    import timm.layers

    monkeypatch.setattr(timm.layers.config, "_USE_REENTRANT_CKPT", reentrant)
    model, batch = example.model(), example.batch()
    wc.condition_(model)
    expected = gradients(model, batch)

    def as_a_whole(model: nn.Module, batch: Any) -> Any:
        key = torch.zeros((), requires_grad=True)  # the reentrant kind needs an input with a gradient
        return checkpoint(lambda _: tuple(tensors(call(model, batch))), key, use_reentrant=reentrant)

    assert_same_gradients(expected, gradients(model, batch, as_a_whole))
    if with_library_checkpointing(model, reentrant):
        assert_same_gradients(expected, gradients(model, batch))


@contract
def test_compile(example: Example) -> None:
    """Attaching to a compiled model takes effect: its code is traced anew, as if it were compiled only now."""
    model, batch = example.model(), example.batch()
    plain = outputs(model, batch)
    compiled = torch.compile(model, backend="aot_eager")
    assert same(outputs(compiled, batch), plain, 1e-4)
    wc.condition_(model)
    conditioned = outputs(model, batch)
    assert differ(conditioned, plain)
    assert same(outputs(compiled, batch), conditioned, 1e-4)


@contract
def test_export(example: Example) -> None:
    """An exported program computes the same after a round trip through a file."""
    model, batch = example.model().eval(), example.batch()
    wc.condition_(model)
    expected = outputs(model, batch)
    keywords = batch if isinstance(batch, Mapping) else None
    with torch.no_grad():
        program = torch.export.export(model, () if keywords else batch, keywords)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    torch.manual_seed(0)
    found = list(tensors(loaded(**keywords) if keywords else loaded(*batch)))
    assert same(found, expected, 1e-5)
    assert same(outputs(model, batch), expected)  # and the model itself has kept no trace of it


@contract_of(lambda example: example.padded)
def test_padding(example: Example) -> None:
    """Outputs of real positions do not depend on how much padding the batch has."""
    assert example.padded is not None
    model = example.model()

    def real_outputs(extra: int) -> Tensor:
        batch, real = example.padded(extra)
        (output, *_) = outputs(model, batch)
        return output[real] if output.shape[: real.ndim] == real.shape else output

    plain = real_outputs(7)
    wc.condition_(model, LEAKY)
    expected = real_outputs(0)
    assert torch.isfinite(expected).all()
    assert differ([expected], [plain])
    for extra in (1, 7):
        torch.testing.assert_close(real_outputs(extra), expected, rtol=1e-5, atol=1e-5)


@contract
def test_autocast(example: Example) -> None:
    """bfloat16 autocast: dtype as without conditioning, bound up to one rounding, gradients finite."""
    model, batch = example.model(), example.batch()
    with torch.autocast("cpu", torch.bfloat16):
        plain = outputs(model, batch)
        wc.condition_(model, LEAKY)
        (hook,) = token_hooks(model)
        seen = []
        hook.transform.register_forward_hook(lambda module, args, y: seen.append((*args, y)))
        conditioned = outputs(model, batch)
        ((x, mask, y),) = seen
        grads = gradients(model, batch)
    assert [t.dtype for t in plain] == [t.dtype for t in conditioned]
    assert y.dtype == x.dtype
    # Rounding moves singular values by at most eps·‖Y‖_F·(1/√N+1/√d) or so, each being at least σ₁(Y)/2.
    noise = 2 * BF16 * torch.linalg.matrix_norm(y.float()) * (y.shape[-2] ** -0.5 + y.shape[-1] ** -0.5)
    sigma = wc.spectrum(y.float(), mask)
    bound = (sigma.sigma_max + noise) / (sigma.sigma_max / 2 - noise)
    with torch.autocast("cpu", torch.bfloat16):
        assert (wc.spectrum(y, mask).kappa_pinv <= bound).all()
    assert bound.max() < 2.2
    assert all(grad.isfinite().all() for grad in grads.values())


@contract
def test_measuring(example: Example) -> None:
    """The monitor finds the tokens, both sides of the correction and every head of some self-attention layer."""
    model, batch = example.model(), example.batch()
    wc.condition_(model, LEAKY)
    expected = outputs(model, batch)
    rows = wc.measure(model, batch)
    by_site = {row.site: row for row in rows}
    assert rows[0].site == "tokens"
    assert set(by_site) - {"attention.weights"} == {
        "tokens",
        "conditioned.before",
        "conditioned.after",
        "attention.output",
    }
    assert by_site["conditioned.after"].kappa_pinv <= 2.002 < by_site["conditioned.before"].kappa_pinv
    assert all(row.kappa >= 1 and row.rank >= 1 and row.samples >= 1 for row in rows)
    # A single row per head, as in class attention, would say nothing. A detector's windows may hold only padding.
    assert all(row.rank > 1 for row in rows) or find_known(model).sites.output_of is not None
    assert same(outputs(model, batch), expected)


@contract
def test_static(example: Example) -> None:
    """The fixed correction at every site: calibrated, of the right size, seen in the output, removable."""
    model, batch = example.model(), example.batch()
    plain = outputs(model, batch)
    handle = wc.condition_(model, wc.ConditioningConfig(scope="static"))
    sigma = wc.calibrate_(model, [batch])
    (hook,) = token_hooks(model)
    seen = []
    hook.transform.register_forward_hook(lambda module, args, y: seen.append((*args, y)))
    assert differ(outputs(model, batch), plain)
    ((x, *_, y),) = seen
    blocks = -(-x.shape[-2] // x.shape[-1])  # Q is so many orthogonal matrices on top of each other
    assert torch.linalg.matrix_norm((y - x).float(), 2).max() <= 1.001 * sigma * blocks**0.5
    assert (y - x)[0].norm() > sigma
    handle.remove()
    assert same(outputs(model, batch), plain)


@pytest.mark.parametrize("placement", ["input", "tokens"])
@contract
def test_fold(example: Example, placement: Any) -> None:
    """Folding the fixed correction leaves outputs as they are, or is refused where there is nothing to fold into."""
    model, batch = example.model(), example.batch()
    sites = find_known(model).sites
    if placement == "tokens" and sites.tokens is None:
        pytest.skip("has no such placement")
    wc.condition_(model, wc.ConditioningConfig(scope="static", placement=placement))
    wc.calibrate_(model, [batch])
    expected, keys = outputs(model, batch), list(model.state_dict())
    if placement not in sites.folds:
        with pytest.raises(ValueError, match="cannot be folded"):
            wc.fold_(model)
        return
    wc.fold_(model)
    assert not wc.is_conditioned(model)
    assert list(model.state_dict()) == keys
    assert same(outputs(model, batch), expected, 1e-5)
