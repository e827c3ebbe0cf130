"""Gaps in the docstrings of public names, found in the source without importing it."""

import ast
import re
from dataclasses import dataclass, field

from page_blocks import ROOT

from gracekv import errors

PACKAGE = ROOT / "gracekv"
NAMED_ERRORS = {name for name, made in vars(errors).items() if isinstance(made, type)}
_TENSOR = re.compile(r"\bTensor\b")
_SHAPE = re.compile(r"\[[^\]]*\]|\bscalar\b")


@dataclass
class Function:
    """A public function or method.

    Attributes:
        place: file and line.
        name: with its class.
        said: its docstring, or the nearest base's; for `__call__` and the like, also the class's.
        signature: arguments and result as written.
        raises: named errors that its own body raises.
    """

    place: str
    name: str
    said: str
    signature: str
    raises: set


@dataclass
class Class:
    """A public class.

    Attributes:
        place: file and line.
        name: as written.
        said: its docstring, or "".
        fields: annotated attributes and their annotations.
        bases: as written.
        methods: its functions as syntax, by name.
        plain: whether it is neither a dataclass nor a named tuple, so annotations are not fields.
    """

    place: str
    name: str
    said: str
    fields: dict = field(default_factory=dict)
    bases: list = field(default_factory=list)
    methods: dict = field(default_factory=dict)
    plain: bool = True


def described(text, name):
    """A docstring's description of a field: the lines after `name:`, or ""."""
    found = re.search(rf"^( *){name}(?: \([^)]*\))?: *(.*(?:\n\1 +\S.*)*)", text, re.MULTILINE)
    return found[2] if found else ""


def classes_and_functions(files=None):
    """Everything public in `gracekv/`, in order of files."""
    classes, functions = [], []
    # Except the commands, whose docstrings --help prints.
    every = (p for p in sorted(PACKAGE.rglob("*.py")) if not p.name.endswith("commands.py"))
    for path in files or every:
        inside = path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.append(_class(node, inside))
            elif isinstance(node, ast.FunctionDef) and not _hidden(node):
                functions.append(_function(node, inside, node.name, _doc(node)))
    by_name = {made.name: made for made in classes}
    for made in classes:
        place = made.place.partition(":")[0]
        for name, node in made.methods.items():
            said = _doc(node) or _inherited(made, name, by_name)
            if name.startswith("__"):
                said += "\n" + made.said
            functions.append(_function(node, place, f"{made.name}.{name}", said))
    return classes, functions


def _doc(node):
    return ast.get_docstring(node) or ""


def _hidden(node):
    """Whether a name is not public: private, or an overload of a function."""
    overload = any(ast.unparse(made) == "overload" for made in node.decorator_list)
    return overload or re.match("_$|_[^_]|__getattr__|__dir__", node.name)


def _class(node, inside):
    made = Class(f"{inside}:{node.lineno}", node.name, _doc(node))
    made.bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
    decorators = " ".join(ast.unparse(x) for x in node.decorator_list)
    made.plain = "dataclass" not in decorators and "NamedTuple" not in made.bases
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            note = ast.unparse(part.annotation)
            if not part.target.id.startswith("_") and "ClassVar" not in note:
                made.fields[part.target.id] = note
        elif isinstance(part, ast.FunctionDef) and not _hidden(part):
            made.methods[part.name] = part
    return made


def _function(node, inside, name, said):
    result = ast.unparse(node.returns) if node.returns else ""
    raised = {
        ast.unparse(part.exc.func if isinstance(part.exc, ast.Call) else part.exc)
        for part in ast.walk(node)
        if isinstance(part, ast.Raise) and part.exc is not None
    }
    place, signature = f"{inside}:{node.lineno}", f"{ast.unparse(node.args)} -> {result}"
    return Function(place, name, said, signature, raised & NAMED_ERRORS)


def _inherited(made, name, by_name):
    """The docstring of the nearest base's method of that name; other libraries' always count."""
    for base in made.bases:
        if base not in by_name:
            if base not in ("ABC", "Generic", "NamedTuple", "Protocol", "object"):
                return f"See {base}.{name}. [its shapes]"
            continue
        above = by_name[base]
        if name in above.methods and _doc(above.methods[name]):
            return _doc(above.methods[name])
        if found := _inherited(above, name, by_name):
            return found
    return ""


def undocumented(classes, functions):
    """Classes without a docstring, and fields and functions without a description."""
    for made in classes:
        if not made.said:
            yield f"{made.place} {made.name} has no docstring"
    for made, name, _, said in fields(classes):
        if not said:
            yield f"{made.place} {made.name} does not say what {name} is"
    for made in functions:
        if not made.said.strip():
            yield f"{made.place} {made.name} has no docstring"


def exported(path):
    """The names that a module exports: those of its `__all__`, else `name as name` of imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    values = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    if "__all__" in values:
        names = []
        for item in values["__all__"].elts:
            starred = isinstance(item, ast.Starred)
            names += ast.literal_eval(values[item.value.id] if starred else ast.List([item]))
        return names
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [x.name for node in imports for x in node.names if x.name == x.asname]


def fields(classes):
    """(class, field's name, annotation, description) of all data classes."""
    for made in classes:
        if not made.plain:
            for name, note in made.fields.items():
                yield made, name, note, described(made.said, name)


def without_shapes(classes, functions):
    """Fields and functions with tensors whose docstring names no shape in brackets."""
    for made, name, note, said in fields(classes):
        if _TENSOR.search(note) and not _SHAPE.search(said):
            yield f"{made.place} {made.name}.{name} is a tensor of unknown shape"
    for made in functions:
        if _TENSOR.search(made.signature) and not _SHAPE.search(made.said):
            yield f"{made.place} {made.name} takes or returns tensors of unknown shape"


def without_errors(functions):
    """Functions that raise a named error which their docstring does not name."""
    for made in functions:
        for error in sorted(made.raises):
            if error not in made.said:
                yield f"{made.place} {made.name} does not name {error}"
