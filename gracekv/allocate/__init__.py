"""Stage 4: how the budget is spent."""

from gracekv.allocate.adaptive_heads import AdaptiveHeads
from gracekv.allocate.base import (
    ALLOCATORS,
    FLOORS,
    QUOTAS,
    Allocator,
    Floor,
    Frontier,
    Quota,
    Selection,
)
from gracekv.allocate.budget import Budget, BudgetOptions, RecentWindow
from gracekv.allocate.density import Density
from gracekv.allocate.exact_dp import ExactDP
from gracekv.allocate.global_ import Global
from gracekv.allocate.greedy import Greedy
from gracekv.allocate.lagrangian import Lagrangian, upper_bound
from gracekv.allocate.none import NoFloor
from gracekv.allocate.per_head import PerHead
from gracekv.allocate.plan import BudgetPlan
from gracekv.allocate.pyramid import Pyramid
from gracekv.allocate.singleton import Singleton

__all__ = [
    "ALLOCATORS",
    "FLOORS",
    "QUOTAS",
    "AdaptiveHeads",
    "Allocator",
    "Budget",
    "BudgetOptions",
    "BudgetPlan",
    "Density",
    "ExactDP",
    "Floor",
    "Frontier",
    "Global",
    "Greedy",
    "Lagrangian",
    "NoFloor",
    "PerHead",
    "Pyramid",
    "Quota",
    "RecentWindow",
    "Selection",
    "Singleton",
    "upper_bound",
]
