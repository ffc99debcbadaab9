"""docs/models.md says what the registry does."""

import pytest
from torch import nn

from tests.sites.models import PAGE, page
from wellcond.sites import REGISTRY
from wellcond.sites.table import models_page


def test_the_committed_page_is_what_the_registry_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make models` and commit docs/models.md"


def test_every_class_is_on_the_page() -> None:
    text = page()
    assert [name for name in (*REGISTRY.models, *REGISTRY.attentions) if f"`{name}`" not in text] == []


def test_an_example_without_a_known_model_is_refused() -> None:
    with pytest.raises(ValueError, match="0 known models"):
        models_page(REGISTRY, [("linear", nn.Linear(2, 2))])
