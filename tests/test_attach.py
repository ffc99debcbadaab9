"""condition_ as its users meet it: compiled models, converted models, checkpoints, second thoughts."""

import copy
import json
import warnings

import pytest
import torch
from torch import nn

import wellcond as wc
from tests.sites.models import MODELS, Encoder, faster_rcnn, photographs
from wellcond.attach import attach_
from wellcond.hooks import token_hooks


class Toy(nn.Module):
    """Tokens, then a layer that looks at each of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.embed(x).tanh())


@pytest.fixture
def x():
    return torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@torch.no_grad()
def test_d1_attaching_to_a_compiled_model_takes_effect(x, backend):
    model = Toy()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    plain = compiled(x)
    handle = wc.condition_(model, site="embed")
    conditioned = compiled(x)
    assert (conditioned - plain).norm() > 1e-2 * plain.norm()
    torch.testing.assert_close(conditioned, model(x))
    handle.remove()
    torch.testing.assert_close(compiled(x), plain)


@pytest.mark.filterwarnings("error")
@torch.no_grad()
def test_d1_attaching_through_the_compiled_wrapper(x):
    """The wrapper is a module too; the site is then below _orig_mod."""
    model = Toy()
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x)
    wc.condition_(compiled, site="_orig_mod.embed")
    assert not torch.allclose(compiled(x), plain, rtol=1e-2)
    vit = MODELS["timm ViT"].model().eval()
    (site,) = wc.condition_(torch.compile(vit, backend="eager")).sites
    assert site.module == "_orig_mod.norm_pre"
    assert wc.is_conditioned(vit)


@pytest.mark.filterwarnings("error")
@torch.no_grad()
def test_a_compiled_part_of_an_eager_model_is_no_false_alarm(x):
    """Compiled code does not count its calls; nor may the check then think that the site was not reached."""
    model = nn.Sequential(Toy(), nn.Identity())
    wc.condition_(model, site="0.embed")
    expected = model(x)
    model[0].compile(backend="eager")
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)


def test_d1_a_monitor_keeps_counting_under_fullgraph(x):
    model = MODELS["timm ViT"].model()
    wc.condition_(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    (images,) = MODELS["timm ViT"].batch()
    monitor = wc.ConditioningMonitor(compiled, every=1, batch=images)
    for step in range(3):
        compiled(images).sum().backward()
        monitor.after_step(step)
    tokens = [row for row in monitor.rows if row.site == "tokens"]
    assert [row.step for row in tokens] == [0, 1, 2]
    assert all(row.kappa_pinv <= 2.002 for row in tokens)


# ------------------------------------------------------------------------------------------- not where one thinks


def test_d14_no_site_is_an_error():
    with pytest.raises(ValueError, match=r"no known transformer inside Sequential.*0: Linear"):
        wc.condition_(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.filterwarnings(
    "ignore:.*quantiz.*:DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning"
)
@torch.no_grad()
def test_d14_a_converted_model_is_still_conditioned(x):
    """Dynamic quantization replaces modules; the site fires all the same."""
    model = Toy().eval()
    wc.condition_(model, site="embed")
    expected = model(x)
    converted = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert type(converted.embed) is not nn.Linear
    assert wc.is_conditioned(converted)
    found = converted(x)
    assert token_hooks(converted)[0].calls == token_hooks(model)[0].calls + 1
    # Eight bits of weights: a few percent, where leaving the correction out would be far more.
    assert (found - expected).norm() < 0.1 * expected.norm()
    wc.remove_(model)
    assert (model(x) - expected).norm() > 0.1 * expected.norm()


def test_d14_a_site_that_is_replaced_or_bypassed_warns_once(x):
    model = Toy()
    wc.condition_(model, site="embed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        model(x)
    model.embed = nn.Linear(3, 8)
    with pytest.warns(RuntimeWarning, match="did not reach the site 'embed'"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


# ----------------------------------------------------------------------------------------------------- checkpoints


def test_a_state_dict_goes_both_ways(x):
    """F3 in one process: keys of a conditioned model are those of a plain one, wrapped or not."""
    plain, conditioned = Toy(), Toy()
    wc.condition_(conditioned, site="embed")
    plain.load_state_dict(conditioned.state_dict(), strict=True)
    conditioned.load_state_dict(plain.state_dict(), strict=True)
    assert wc.is_conditioned(conditioned)


@pytest.mark.parametrize("name", ["timm ViT", "timm XCiT", "torch TransformerEncoder, batch second"])
@torch.no_grad()
def test_restore_gives_the_same_model(name, tmp_path):
    example = MODELS[name]
    model = example.model().eval()
    config = wc.ConditioningConfig(rescale="frobenius", null_space="complete")
    handle = wc.condition_(model, config)
    wc.save_config(model, tmp_path)
    again = example.model().eval()
    restored = wc.restore_(again, tmp_path)
    assert restored.config == handle.config
    assert restored.sites == handle.sites
    assert torch.equal(again(*example.batch()), model(*example.batch()))
    json.loads((tmp_path / "wellcond.json").read_text())


@torch.no_grad()
def test_restore_of_a_named_site(x, tmp_path):
    model, again = Toy(), Toy()
    wc.condition_(model, site="embed", layout="NLC")
    wc.save_config(model, tmp_path)
    wc.restore_(again, tmp_path)
    assert torch.equal(again(x), model(x))


def test_restore_says_what_is_wrong(x, tmp_path):
    with pytest.raises(FileNotFoundError, match="not saved with wellcond"):
        wc.restore_(Toy(), tmp_path)
    with pytest.raises(ValueError, match="not conditioned"):
        wc.save_config(Toy(), tmp_path)
    (tmp_path / "wellcond.json").write_text('{"config": {"colour": "red"}, "site": {"module": "embed"}}')
    with pytest.raises(ValueError, match="colour"):
        wc.restore_(Toy(), tmp_path)
    model = MODELS["timm ViT"].model()
    wc.condition_(model)
    wc.save_config(model, tmp_path)
    with pytest.raises(ValueError, match=r"of a VisionTransformer, but this Xcit"):
        wc.restore_(MODELS["timm XCiT"].model(), tmp_path)


# --------------------------------------------------------------------------------------------------- second thoughts


def test_the_handle_is_a_context_also_when_something_fails(x):
    model = Toy()
    with pytest.raises(RuntimeError), wc.condition_(model, site="embed"):
        model(torch.zeros(2, 5))
    assert not wc.is_conditioned(model)


def test_removal_by_a_copy_of_the_handle_leaves_the_original(x):
    model = Toy()
    wc.condition_(model, site="embed")
    twin = copy.deepcopy(model)
    wc.remove_(twin)
    assert wc.is_conditioned(model)
    assert not wc.is_conditioned(twin)


def test_a_part_of_a_conditioned_model_is_conditioned():
    model = faster_rcnn()
    wc.condition_(model)
    assert wc.is_conditioned(model.backbone)
    assert not wc.is_conditioned(model.roi_heads)
    with pytest.raises(ValueError, match="already"):
        wc.condition_(model.backbone)


def test_controls_go_where_the_correction_would(x):
    """attach_ puts any transform at the site, but such a model does not count as conditioned."""

    class Larger(nn.Module):
        def forward(self, x, mask=None):
            return 10 * x

    model = MODELS["timm ViT"].model().eval()
    (images,) = MODELS["timm ViT"].batch()
    incoming = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: incoming.append(args[0]))
    with torch.no_grad():
        model(images)
        handle = attach_(model, Larger(), None, "input")
        model(images)
    torch.testing.assert_close(incoming[1], 10 * incoming[0])
    assert handle.config is None
    assert not wc.is_conditioned(model)
    wc.remove_(model)
    assert token_hooks(model) == []


def test_two_forwards_before_one_backward():
    """C3 in one process: no state is overwritten in place."""
    model = MODELS["timm ViT"].model()
    wc.condition_(model)
    (images,) = MODELS["timm ViT"].batch()
    (model(images) - model(images.flip(0))).square().sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    first, second = model(images), model(images.flip(0))
    (first - second).square().sum().backward()
    assert all(torch.equal(together[name], p.grad) for name, p in model.named_parameters())


def test_nothing_of_a_batch_outlives_the_call():
    model = faster_rcnn().eval()
    wc.condition_(model)
    (hook,) = token_hooks(model)
    with torch.no_grad():
        model(*photographs())
    assert hook.capture.values == {}
    encoder = Encoder()
    wc.condition_(encoder)
    (hook,) = token_hooks(encoder)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        encoder(torch.randn(2, 5, 6), torch.zeros(2, 4, dtype=torch.bool))
    assert hook.capture.values == {}
