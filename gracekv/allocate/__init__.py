"""Stage 4: how the budget is spent."""

from gracekv.allocate.adaptive_heads import AdaptiveHeads as AdaptiveHeads
from gracekv.allocate.base import ALLOCATORS as ALLOCATORS
from gracekv.allocate.base import FLOORS as FLOORS
from gracekv.allocate.base import QUOTAS as QUOTAS
from gracekv.allocate.base import Allocator as Allocator
from gracekv.allocate.base import Floor as Floor
from gracekv.allocate.base import Frontier as Frontier
from gracekv.allocate.base import Quota as Quota
from gracekv.allocate.budget import Budget as Budget
from gracekv.allocate.budget import BudgetOptions as BudgetOptions
from gracekv.allocate.budget import RecentWindow as RecentWindow
from gracekv.allocate.density import Density as Density
from gracekv.allocate.exact_dp import ExactDP as ExactDP
from gracekv.allocate.global_ import Global as Global
from gracekv.allocate.greedy import Greedy as Greedy
from gracekv.allocate.lagrangian import Lagrangian as Lagrangian
from gracekv.allocate.lagrangian import upper_bound as upper_bound
from gracekv.allocate.none import NoFloor as NoFloor
from gracekv.allocate.per_head import PerHead as PerHead
from gracekv.allocate.plan import BudgetPlan as BudgetPlan
from gracekv.allocate.pyramid import Pyramid as Pyramid
from gracekv.allocate.selection import Selection as Selection
from gracekv.allocate.singleton import Singleton as Singleton
