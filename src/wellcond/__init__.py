from wellcond.config import ConditioningConfig
from wellcond.linalg import condition_number, polar, spectrum
from wellcond.tokens import TokenConditioner, conditioned_tokens, correction
