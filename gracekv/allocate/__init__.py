"""Stage 4: who gets the budget."""

from gracekv.allocate.base import ALLOCATORS, FLOORS, QUOTAS, Allocator, Floor, Frontier, Quota
from gracekv.allocate.budget import Budget, BudgetPlan, RecentWindow

__all__ = [
    "ALLOCATORS",
    "FLOORS",
    "QUOTAS",
    "Allocator",
    "Budget",
    "BudgetPlan",
    "Floor",
    "Frontier",
    "Quota",
    "RecentWindow",
]
