"""Experiments, one typed file for each data set or published recipe."""

from wellcond.recipes.digits import DIGITS
from wellcond.recipes.fashion_mnist import FASHION_MNIST
from wellcond.recipes.ingredients import Mixing, Schedule
from wellcond.recipes.mnist import MNIST
from wellcond.recipes.recipe import Paper, Recipe, Source

RECIPES = {recipe.name: recipe for recipe in (*DIGITS, *FASHION_MNIST, *MNIST)}

__all__ = ["RECIPES", "Mixing", "Paper", "Recipe", "Schedule", "Source"]
