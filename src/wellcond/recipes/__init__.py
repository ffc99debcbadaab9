"""Experiments, one typed file for each data set or published recipe."""

from wellcond.recipes.crammed_bert import CRAMMED_BERT
from wellcond.recipes.davit_b import DAVIT_B_IMAGENET
from wellcond.recipes.deit_b import DEIT_B_IMAGENET
from wellcond.recipes.digits import DIGITS
from wellcond.recipes.fashion_mnist import FASHION_MNIST
from wellcond.recipes.glue import FINE_TUNING
from wellcond.recipes.gpt2 import GPT2
from wellcond.recipes.ingredients import Schedule
from wellcond.recipes.lra import LRA
from wellcond.recipes.lra_small import LRA_SMALL
from wellcond.recipes.maskrcnn_coco import MASKRCNN_COCO
from wellcond.recipes.maskrcnn_digits import MASKRCNN_DIGITS
from wellcond.recipes.mnist import MNIST
from wellcond.recipes.recipe import Paper, Recipe, Source
from wellcond.recipes.swin_b import SWIN_B_IMAGENET
from wellcond.recipes.vit_b import VIT_B_IMAGENET
from wellcond.recipes.xcit_m24 import XCIT_M24_IMAGENET

IMAGENET = (VIT_B_IMAGENET, DEIT_B_IMAGENET, SWIN_B_IMAGENET, XCIT_M24_IMAGENET, DAVIT_B_IMAGENET)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        *DIGITS,
        *FASHION_MNIST,
        *MNIST,
        *GPT2,
        *CRAMMED_BERT,
        *FINE_TUNING,
        MASKRCNN_DIGITS,
        *LRA_SMALL,
        *LRA,
        *IMAGENET,
        *MASKRCNN_COCO,
    )
}

__all__ = ["IMAGENET", "RECIPES", "Paper", "Recipe", "Schedule", "Source"]
