"""Experiments, one typed file each."""

from wellcond.recipes.digits import DIGITS_VIT
from wellcond.recipes.recipe import Recipe

RECIPES = {recipe.name: recipe for recipe in (DIGITS_VIT,)}

__all__ = ["RECIPES", "Recipe"]
