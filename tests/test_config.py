"""ConditioningConfig: frozen, checked, and the same after JSON."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellcond import ConditioningConfig

configs = st.builds(
    ConditioningConfig,
    method=st.sampled_from(["auto", "svd", "gram"]),
    null_space=st.sampled_from(["range", "complete"]),
    rank_tol=st.none() | st.floats(0.0, 0.99),
    gradient=st.sampled_from(["constant", "exact"]),
    rescale=st.sampled_from(["none", "frobenius"]),
    scope=st.none() | st.sampled_from(["sample", "table", "static"]),
    placement=st.sampled_from(["input", "tokens"]),
    strength=st.floats(0.01, 100.0),
    sigma=st.none() | st.floats(0.01, 1e6),
    allow_leak=st.booleans(),
)


@given(configs)
def test_equal_after_json(config):
    assert ConditioningConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ConditioningConfig().method = "svd"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "qr"),
        ("null_space", "all"),
        ("gradient", "none"),
        ("rescale", "spectral"),
        ("scope", "batch"),
        ("placement", "output"),
        ("rank_tol", 1.0),
        ("rank_tol", -0.1),
        ("strength", 0.0),
        ("sigma", float("nan")),
    ],
)
def test_a_wrong_value_is_named(field, value):
    with pytest.raises(ValueError, match=str(value)):
        ConditioningConfig(**{field: value})


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match="colour"):
        ConditioningConfig.from_dict({"colour": "blue"})
