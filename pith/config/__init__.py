"""The recipe as a value.

TOML in (`Recipe.load`), TOML out (`Recipe.to_toml`), JSON schema out (`Recipe.json_schema`). A
loaded recipe holds the fields of its model config itself, so that what it writes loads anywhere.
All faults of a request are raised together, as one RequestError.
"""

from pith.config.recipe import Recipe
from pith.config.source import shipped

__all__ = ["Recipe", "shipped"]
