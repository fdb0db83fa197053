"""Docstrings of functions begin with a verb, so that a reader knows what a call does before reading the code."""

import ast
from collections.abc import Iterator

import pytest

from tests.meta.source import modules, nodes_of, place

#: The verbs that a docstring may begin with, in the imperative. Add yours; a word that is no verb does not belong here.
_VERBS = """
abort accept accumulate acquire adapt add adjust admit adopt advance agree align all-gather all-reduce allocate
allow announce answer append apply arrange ascend ask assemble assert assign associate attach average await back
balance begin bind block borrow bound break bring broadcast build call cancel cast catch change check choose claim
clean clear clip clone close collect combine come commit compare compile complete compute concatenate configure
confirm connect construct consume continue convert copy correct count cover create cross cut deal decide declare
decode decrease defer define delay delete deliver deposit describe destroy detach determine discard discover divide
do download drain draw drop dump duplicate empty enable encode end enqueue ensure enter enumerate erase estimate
evaluate evict exchange exclude execute exit expand expect explain export express extend extract fail fault fetch
fill filter find finish fit flag flatten flush fold follow forbid force forget fork format forward free freeze
gather generate get give go grow guard guess halve hand handle hash have hear help hide hold ignore import include
increase increment index infer inform inherit initialise initialize inject insert inspect install invalidate issue
iterate join keep kill label launch lay lead learn lease leave lend let limit link list listen load locate lock log
look lose lower make map mark mask match measure meet merge mix modify move multiply name negate normalise note
notice notify number obey observe obtain offer offload omit open order overlap overwrite pack pad page-lock parse
part pass patch pause perform pick pin place plan poison poll pop post postpone predict prefer prefetch prepare
prevent print probe produce propagate prove provide prune publish pull push put quantise query queue quote raise
read rebuild recompute record recover redraw reduce reduce-scatter refer refill refuse register regroup simulate reject
release reload remap remember remove rename render repeat replace replay report request require reserve reset
resize resolve respond restore resume retire retrieve retry return reuse reverse revert roll round run sample save
say scale scan scatter schedule search see select send separate serialise serve set settle shard share shift show
shrink shut signal simulate skip sleep slice solve sort spawn speak specify split spoil spread stage start state
step stop store stream stretch strip submit subtract sum suppress surround swap switch synchronise synchronize tag
take talk teach tell terminate test tie time touch trace track train transfer translate treat trim truncate try turn
uncast undo unlock unpack unpin unregister unscale update upload use validate verify view visit wait wake walk warn
watch weigh wipe withdraw work wrap write yield zero
"""
VERBS = frozenset(_VERBS.split())


def documented(module: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Give the functions of a module that have a docstring and do something when called: no properties, no dunders."""
    for node in nodes_of(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("__"):
            continue
        text = ast.get_docstring(node)
        if text and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list):
            yield node, text


def begins_with_a_verb(node: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> bool:
    """Return whether a docstring begins with a verb, or says what a function that returns a bool tells."""
    first, second, *_ = [*text.split(), "", ""]
    if first == "Whether":
        return node.returns is not None and ast.unparse(node.returns) == "bool"
    # "Copy of the buffer" and "Share of the bytes" are nouns.
    return first.rstrip(".,;").lower() in VERBS and first[:1].isupper() and second != "of"


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    found = ((module, node, text) for module in modules() for node, text in documented(module))
    wrong = [
        f"{place(m, node)}: {text.splitlines()[0]}" for m, node, text in found if not begins_with_a_verb(node, text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "passes"),
    [
        ("def f() -> None:\n    '''Give the memory back.'''", True),
        ("def f() -> bool:\n    '''Whether it is over.'''", True),
        ("def f() -> None:\n    '''Whether it is over.'''", False),
        ("def f() -> None:\n    '''The memory that is left.'''", False),
        ("def f() -> None:\n    '''All tiles of a unit were submitted.'''", False),
        ("def f() -> None:\n    '''Copy of a buffer.'''", False),
        ("def f() -> None:\n    '''Work: copy a tensor.'''", False),
        ("def f() -> None:\n    '''Returns the name.'''", False),
    ],
)
def test_a_noun_is_told_from_a_verb(source: str, passes: bool) -> None:
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert begins_with_a_verb(node, ast.get_docstring(node) or "") is passes
