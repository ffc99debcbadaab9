"""torch.nn.TransformerEncoder and nn.MultiheadAttention, and modules that only their owner knows."""

import pytest
import torch
from torch import nn

import wellcond as wc
from tests.sites.models import Encoder
from wellcond.hooks import token_hooks


def encoder(batch_first=True, dropout=0.0, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=batch_first, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first and not options)


@pytest.fixture
def x():
    return torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))


PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


def test_d10_the_fast_path_agrees_with_training(x):
    """eval + no_grad runs on nested tensors; its real rows are those of dropout-free training."""
    model = encoder()
    wc.condition_(model)
    slow = model.train()(x, src_key_padding_mask=PADDING)
    with torch.no_grad():
        fast = model.eval()(x, src_key_padding_mask=PADDING)
    assert fast.shape == (2, 6, 32)
    assert torch.equal(fast[PADDING], torch.zeros(2, 32))  # what shows that it was the fast path
    torch.testing.assert_close(fast[~PADDING], slow[~PADDING], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_batch_first_or_second(x):
    first, second = encoder().eval(), encoder(batch_first=False).eval()
    second.load_state_dict(first.state_dict())
    wc.condition_(first)
    (site,) = wc.condition_(second).sites
    assert site.layout == "LNC"
    a = first(x, src_key_padding_mask=PADDING)
    b = second(x.transpose(0, 1), src_key_padding_mask=PADDING).transpose(0, 1)
    torch.testing.assert_close(a[~PADDING], b[~PADDING], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_d7_tokens_by_keyword(x):
    model = encoder().eval()
    plain = model(x)
    wc.condition_(model)
    assert torch.equal(model(src=x), model(x))
    assert torch.equal(model(src_key_padding_mask=PADDING, src=x), model(x, None, PADDING))
    assert not torch.allclose(model(src=x), plain, rtol=1e-2)


@pytest.mark.parametrize(
    "mask", [PADDING, PADDING.float().masked_fill(PADDING, -torch.inf)], ids=["bool", "additive"]
)
@torch.no_grad()
def test_either_kind_of_padding_mask(x, mask):
    model = encoder().eval()
    wc.condition_(model)
    (hook,) = token_hooks(model)
    seen = []
    hook.transform.register_forward_hook(lambda module, args, y: seen.append((*args, y)))
    model(x, src_key_padding_mask=mask)
    ((before, real, after),) = seen
    assert torch.equal(real, ~PADDING)
    assert torch.equal(before[PADDING], after[PADDING])
    assert wc.spectrum(after, real).kappa_pinv.max() <= 2.002


@torch.no_grad()
def test_one_sequence_without_a_batch(x):
    model = encoder().eval()
    wc.condition_(model)
    torch.testing.assert_close(model(x[0]), model(x)[0], rtol=1e-5, atol=1e-5)
    second = encoder(batch_first=False).eval()
    wc.condition_(second)
    torch.testing.assert_close(second(x[0]), model(x)[0], rtol=1e-5, atol=1e-5)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
CALLS = {
    "additive": {"mask": CAUSAL},
    "bool": {"mask": CAUSAL < 0},
    "said so": {"mask": CAUSAL, "is_causal": True},
    "narrower": {"mask": CAUSAL.masked_fill(torch.ones(6, 6).tril(-3) > 0, -torch.inf)},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_causal_call_is_refused_unless_a_leak_is_asked_for(x, call):
    model = encoder().eval()
    wc.condition_(model)
    with pytest.raises(ValueError, match="allow_leak=True"):
        model(x, **call)
    model(x)  # the same model, not causal, is welcome
    wc.remove_(model)
    wc.condition_(model, wc.ConditioningConfig(allow_leak=True))
    (hook,) = token_hooks(model)
    assert not hook.leaks
    model(x, **call)
    assert hook.leaks


@torch.no_grad()
def test_the_static_scope_does_not_leak_and_is_let_through(x):
    model = encoder().eval()
    wc.condition_(model, wc.ConditioningConfig(scope="static", sigma=2.0))
    changed = x.clone()
    changed[:, 4:] += 1.0
    a, b = model(x, mask=CAUSAL), model(changed, mask=CAUSAL)
    torch.testing.assert_close(a[:, :4], b[:, :4], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(a[:, 4:], b[:, 4:], rtol=1e-3)


@torch.no_grad()
def test_the_leak_is_real(x):
    """What is refused by default does show the past what comes later."""
    model = encoder().eval()
    changed = x.clone()
    changed[:, 4:] += 1.0
    assert torch.equal(model(x, mask=CAUSAL)[:, :4], model(changed, mask=CAUSAL)[:, :4])
    wc.condition_(model, wc.ConditioningConfig(allow_leak=True))
    assert (model(x, mask=CAUSAL)[:, :4] - model(changed, mask=CAUSAL)[:, :4]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "mask",
    [torch.zeros(6, 6), torch.eye(6).log(), torch.rand(6, 6) > 2.0],
    ids=["nothing", "diagonal and past", "bool"],
)
def test_other_attention_masks_are_no_reason_to_refuse(x, mask):
    hides = bool((mask == -torch.inf).triu(1).sum() == 15)  # only itself: later tokens are hidden after all
    model = encoder().eval()
    wc.condition_(model)
    if hides:
        with pytest.raises(ValueError, match="causal"):
            model(x, mask=mask)
    else:
        assert model(x, mask=mask).isfinite().all()


@torch.no_grad()
def test_the_encoder_of_a_whole_transformer():
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True).eval()
    (site,) = wc.condition_(model).sites
    assert (site.module, site.side) == ("encoder", "input")
    assert model(torch.randn(2, 5, 16), torch.randn(2, 3, 16)).isfinite().all()


def test_layers_of_another_make_need_a_site():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1, enable_nested_tensor=False)
    model.layers = nn.ModuleList([nn.Identity()])
    with pytest.raises(ValueError, match="site="):
        wc.condition_(model)


def test_a_control_may_be_causal(x):
    """Only what conditions can leak: a control that scales tokens runs on any call."""
    from wellcond.attach import attach_

    class Twice(nn.Module):
        def forward(self, x, mask=None):
            return 2 * x

    model = encoder().eval()
    attach_(model, Twice(), None, "input")
    assert model(x, mask=CAUSAL).isfinite().all()
    assert not wc.is_conditioned(model)


# ------------------------------------------------------------------------------------- modules with a named site


class Own(nn.Module):
    """Tokens in whatever form the test asks for."""

    def __init__(self, form):
        super().__init__()
        self.embed = form
        self.head = nn.Identity()

    def forward(self, x):
        return self.head(self.embed(x))


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(0, 1)


class Grid(nn.Module):
    def forward(self, x):
        return x.reshape(2, 2, 3, 32)


class Channels(nn.Module):
    def forward(self, x):
        return x.mT.reshape(2, 32, 2, 3)


@pytest.mark.parametrize(
    ("form", "layout"),
    [
        (nn.Identity(), None),
        (nn.Identity(), "NLC"),
        (Transposed(), "LNC"),
        (Grid(), "NHWC"),
        (Channels(), "NCHW"),
    ],
)
def test_a_named_site_in_every_layout(x, form, layout):
    model = Own(form)
    with wc.condition_(model, site="embed", layout=layout):
        found = model(x)
    torch.testing.assert_close(found, form(wc.conditioned_tokens(x)), rtol=1e-5, atol=1e-5)


def test_errors_name_the_mend(x):
    with pytest.raises(ValueError, match=r"no submodule 'embd'.*'embed'"):
        wc.condition_(Own(nn.Identity()), site="embd")
    with pytest.raises(ValueError, match="layout='NLC'"):
        wc.condition_(encoder(), layout="NLC")
    with pytest.raises(ValueError, match="layout must be one of"):
        wc.condition_(Own(nn.Identity()), site="embed", layout="NCL")
    with pytest.raises(ValueError, match=r"no known transformer.*embed: Identity"):
        wc.condition_(Own(nn.Identity()))
    model = Own(nn.Identity())
    wc.condition_(model, site="embed", layout="NCHW")
    with pytest.raises(ValueError, match=r"declared NCHW but holds shape \(2, 6, 32\)"):
        model(x)


# ------------------------------------------------------------------------- what the monitor reads of nn.Multihead


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padding", [None, PADDING])
def test_heads_of_multihead_attention_by_hand(x, batch_first, padding):
    model = encoder(batch_first).double()
    tokens = x.double()
    batch = {"src": tokens if batch_first else tokens.transpose(0, 1), "src_key_padding_mask": padding}
    rows = [row for row in wc.measure(model, batch) if row.layer == 0]
    attention = model.layers[0].self_attn
    q, k, v = (
        nn.functional.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
        .view(2, 6, 3, 4, 8)
        .permute(2, 0, 3, 1, 4)
    )
    logits = q @ k.mT / 8**0.5
    real = torch.ones(2, 6, dtype=torch.bool) if padding is None else ~padding
    weights = logits.masked_fill(~real[:, None, None], -torch.inf).softmax(-1)
    assert len(rows) == 8
    for row in rows:
        matrices = weights if row.site == "attention.weights" else weights @ v
        kappas = []
        for sample in range(2):
            block = matrices[sample, row.head][real[sample]]
            block = block[:, real[sample]] if row.site == "attention.weights" else block
            kappas.append(torch.linalg.cond(block).item())
        assert row.kappa == pytest.approx(sum(kappas) / 2, rel=1e-6)


def test_bias_of_keys_and_separate_projections(x):
    """Keys that the layer appends itself are no padding, and projections need not be packed."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder()
            self.extra = nn.MultiheadAttention(
                32, 4, add_bias_kv=True, add_zero_attn=True, batch_first=True, kdim=32, vdim=32
            )

        def forward(self, x, padding):
            x = self.encoder(x, src_key_padding_mask=padding)
            return self.extra(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    rows = [row for row in wc.measure(Attention(), (x, PADDING)) if row.module == "extra"]
    assert len(rows) == 8
    assert all(row.samples == 2 and row.kappa > 1 for row in rows)


@torch.no_grad()
def test_measuring_leaves_outputs_as_they_are(x):
    model = Encoder().eval()
    sequence = torch.randn(2, 6, 6)
    plain = model(sequence, PADDING)
    wc.measure(model, (sequence, PADDING))
    assert torch.equal(model(sequence, PADDING), plain)
