"""The hooks by themselves: what they catch, what they leave alone, how they travel."""

import collections
import copy
import pickle

import pytest
import torch
from torch import nn

from wellcond.hooks import CallCapture, TokenHook, replace, token_hooks
from wellcond.sites import Site


class Doubled(nn.Module):
    def forward(self, x, mask=None):
        return 2 * x


class Block(nn.Module):
    """Tokens by position or keyword, one of several arguments."""

    def forward(self, scale=1.0, hidden_states=None):
        return scale * hidden_states


def hooked(module, **site):
    return TokenHook(module, Site("", **site), Doubled(), None, None, None)


x = torch.arange(6.0).view(2, 3)
Pair = collections.namedtuple("Pair", "tokens size")


def test_d7_keyword_and_positional_arguments_are_the_same():
    block = Block()
    hook = hooked(block, side="input", key="hidden_states")
    assert torch.equal(block(hidden_states=x), 2 * x)
    assert torch.equal(block(scale=3.0, hidden_states=x), 6 * x)
    hook.remove()
    hooked(block, side="input", key=1)
    assert torch.equal(block(3.0, x), 6 * x)
    assert torch.equal(hooked_identity()(x), 2 * x)
    assert torch.equal(hooked_identity()(input=x), 2 * x)


def hooked_identity():
    module = nn.Identity()
    hooked(module, side="input")
    return module


def test_a_call_without_tokens_says_so():
    block = Block()
    hooked(block, side="input", key="hidden_states")
    with pytest.raises(ValueError, match="without tokens"):
        block(scale=2.0)


def test_elements_of_containers():
    double = lambda value: 2 * value  # noqa: E731
    assert replace((x, "rest"), 0, double)[1] == "rest"
    assert torch.equal(replace((x, "rest"), 0, double)[0], 2 * x)
    assert replace(["rest", 1], 1, double) == ["rest", 2]
    assert replace(Pair(1, (4, 4)), 0, double) == Pair(2, (4, 4))
    assert replace({"a": 1, "b": 2}, "b", double) == {"a": 1, "b": 4}
    with pytest.raises(TypeError, match="needs a mapping"):
        replace((1, 2), "b", double)


def test_the_callers_tensor_and_containers_stay_as_they_were():
    class Two(nn.Module):
        def forward(self, x):
            return self.made

    module = Two()
    module.made = {"tokens": x.clone(), "other": 1}
    hooked(module, key="tokens")
    module(x)
    assert torch.equal(module.made["tokens"], x)


def test_wrong_type_at_the_site_is_named():
    class Tuple(nn.Module):
        def forward(self, x):
            return x, (4, 4)

    module = Tuple()
    hooked(module)
    with pytest.raises(TypeError, match="holds tuple, not a tensor"):
        module(x)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_d9_a_copy_has_hooks_of_its_own(duplicate):
    block = Block()
    (original,) = [hooked(block, side="input", key="hidden_states")]
    twin = duplicate(block)
    (copied,) = token_hooks(twin)
    assert copied is not original
    twin(hidden_states=x)
    assert (original.calls, copied.calls) == (0, 1)
    copied.remove()
    assert torch.equal(twin(hidden_states=x), x)
    assert torch.equal(block(hidden_states=x), 2 * x)


def test_hooks_survive_more_hooks_after_a_round_trip():
    """Handles are numbered per process: a pickled one must not be overwritten by a new one."""
    block = Block()
    hooked(block, side="input", key="hidden_states")
    twin = pickle.loads(pickle.dumps(block))
    for _ in range(3):
        twin.register_forward_pre_hook(lambda module, args: None)
    assert torch.equal(twin(hidden_states=x), 2 * x)


def test_capture_by_position_and_keyword_and_its_end():
    block = Block()
    capture = CallCapture(block, ("scale", "hidden_states"))
    during = []
    block.register_forward_hook(
        lambda module, args, output: during.append(dict(capture.values)), prepend=True
    )
    block(2.0, hidden_states=x)
    block(hidden_states=x)
    assert [values["scale"] for values in during] == [2.0, None]
    assert all(torch.equal(values["hidden_states"], x) for values in during)
    assert capture.values == {}
    with pytest.raises(TypeError):
        block("not a number", hidden_states=x)
    assert capture.values == {}
    capture.remove()
    block(hidden_states=x)
    assert capture.values == {}


def test_capture_of_an_argument_that_does_not_exist():
    with pytest.raises(ValueError, match="no argument \\['mask'\\]"):
        CallCapture(Block(), ("mask",))


def test_counting_calls():
    block = Block()
    hook = hooked(block, side="input", key="hidden_states")
    for _ in range(3):
        block(hidden_states=x)
    assert hook.calls == 3
