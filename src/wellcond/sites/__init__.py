"""Where the embedded tokens are, model by model."""

from wellcond.sites import own, timm, torch, torchvision, transformers
from wellcond.sites.registry import AttentionKind, Found, Registry
from wellcond.sites.site import Layout, ModelSites, Site

REGISTRY = Registry()
"""The known models. Enter your own: ``wellcond.sites.REGISTRY.model("my.module.MyModel")(my_sites)``."""

for library in (timm, torch, torchvision, transformers, own):
    library.register(REGISTRY)

__all__ = ["REGISTRY", "AttentionKind", "Found", "Layout", "ModelSites", "Registry", "Site"]
