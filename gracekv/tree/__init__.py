"""Stage 3: a tree of prototypes for every (layer, KV head, slot)."""

from gracekv.tree.base import Forest
from gracekv.tree.binary import Binary
from gracekv.tree.binary_extract import BinaryExtract
from gracekv.tree.build import build_forest
from gracekv.tree.cost_table import CostTable
from gracekv.tree.distortion import DISTORTIONS, Distortion, DistortionEvaluator
from gracekv.tree.exhaustive import Exhaustive
from gracekv.tree.extract import Extract
from gracekv.tree.leaf_only import LeafOnly
from gracekv.tree.merge import PrototypeRule, Prototypes, merge
from gracekv.tree.midpoint import Midpoint
from gracekv.tree.nodes import Children, IntervalCosts, Nodes
from gracekv.tree.prototype import Prototype
from gracekv.tree.refine import REFINERS, Refiner
from gracekv.tree.tree_batch import TreeBatch, TreeContext
from gracekv.tree.two_level import TwoLevel
from gracekv.tree.unit import Unit

__all__ = [
    "DISTORTIONS",
    "REFINERS",
    "Binary",
    "BinaryExtract",
    "Children",
    "CostTable",
    "Distortion",
    "DistortionEvaluator",
    "Exhaustive",
    "Extract",
    "Forest",
    "IntervalCosts",
    "LeafOnly",
    "Midpoint",
    "Nodes",
    "Prototype",
    "PrototypeRule",
    "Prototypes",
    "Refiner",
    "TreeBatch",
    "TreeContext",
    "TwoLevel",
    "Unit",
    "build_forest",
    "merge",
]
