"""Stage 2: token worth and head sensitivity."""

from gracekv.value.base import SCORERS, SENSITIVITIES, Relevance, Scorer, Sensitivity, TokenScores

__all__ = ["SCORERS", "SENSITIVITIES", "Relevance", "Scorer", "Sensitivity", "TokenScores"]
