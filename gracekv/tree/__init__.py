"""Stage 3: a tree of prototypes for every (layer, KV head, slot)."""

from gracekv.tree.base import Children as Children
from gracekv.tree.base import Forest as Forest
from gracekv.tree.base import IntervalCosts as IntervalCosts
from gracekv.tree.base import Nodes as Nodes
from gracekv.tree.binary import Binary as Binary
from gracekv.tree.binary_extract import BinaryExtract as BinaryExtract
from gracekv.tree.build import build_forest as build_forest
from gracekv.tree.distortion import DISTORTIONS as DISTORTIONS
from gracekv.tree.distortion import Distortion as Distortion
from gracekv.tree.distortion import DistortionEvaluator as DistortionEvaluator
from gracekv.tree.extract import Extract as Extract
from gracekv.tree.leaf_only import LeafOnly as LeafOnly
from gracekv.tree.merge import PrototypeRule as PrototypeRule
from gracekv.tree.merge import Prototypes as Prototypes
from gracekv.tree.merge import merge as merge
from gracekv.tree.prototype import Prototype as Prototype
from gracekv.tree.refine import REFINERS as REFINERS
from gracekv.tree.refine import CostTable as CostTable
from gracekv.tree.refine import Refiner as Refiner
from gracekv.tree.tree_batch import TreeBatch as TreeBatch
from gracekv.tree.tree_batch import TreeContext as TreeContext
from gracekv.tree.two_level import TwoLevel as TwoLevel
from gracekv.tree.unit import Unit as Unit
