"""The filter language: what it means, how it says what is wrong, and that printing and parsing are one another's
inverse."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tui.support.recorded import CLOCK, CONNECTED, live_hosts, run_view, snapshot

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import MicroBatchChanged
from trainctl.tui.state import filter_language as fl
from trainctl.tui.state import reducer, table_schemas
from trainctl.tui.state import table_fields as q
from trainctl.tui.state import view_state as md
from trainctl.tui.state.filter_language import And, Compare, Not, Or, Pattern, Term, TypedLineError, Word
from trainctl.tui.state.rank_rows import Row, rows
from trainctl.tui.state.table_fields import FilterField, Table

KEYWORDS = frozenset({"and", "or", "not"})
MARKS = frozenset("<>=!:~")


def show(term: Term) -> str:
    """The term as it can be typed; parsing that gives the same term."""
    match term:
        case Word(text):
            plain = text.lower() not in KEYWORDS and text[:1] != "-" and not MARKS & set(text)
            return text if plain and _bare(text) else _quoted(text)
        case Pattern(source):
            return f"~{_value(source)}"
        case Compare(name, operator, value):
            return f"{name}{operator}{_value(value)}"
        case Not(inner):
            return f"not {_atom(inner)}"
        case And(terms):
            return " ".join(_atom(inner) for inner in terms)
        case Or(terms):
            return " or ".join(_atom(inner, Or) for inner in terms)


def _atom(term: Term, within: type = And) -> str:
    nested = isinstance(term, Or) or (isinstance(term, And) and within is not Or)
    return f"({show(term)})" if nested else show(term)


def _value(text: str) -> str:
    return text if _bare(text) and text[0] not in "<>=!:~" else _quoted(text)


def _bare(text: str) -> bool:
    return bool(text) and not any(char.isspace() or char in "()\"'\\" for char in text)


def _quoted(text: str) -> str:
    inner = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{inner}"'


STATE = md.ViewState()
for _message in (CONNECTED, snapshot(_VIEW := run_view(4, step=18_240, steps=60_000)), *live_hosts(_VIEW)):
    STATE = reducer.apply(STATE, _message, CLOCK.at_monotonic)
ROWS = rows(STATE, CLOCK)
TABLES = (table_schemas.FLEET, table_schemas.EVENTS, table_schemas.RUNS)


def kept(text: str) -> str:
    return " ".join(row.view.node for row in fl.parse(text, table_schemas.FLEET).kept(ROWS))


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", "studio mbp forge mini"),
        ("tok/s>=1.56k tok/s<3k", "studio mbp"),
        ("own!=n/a -forge", "studio mbp"),
        ("state:lost or share=9", "mbp mini"),
        ("mem>30GB mem%<30", "studio"),
        ("share%>20% share<39", "studio"),
        ("device~RTX|M2", "studio forge"),
        ('"m2 ultra"', "studio"),
        ("~^m", "mbp mini"),
        ("~m" + "." * 199, ""),
        ("age>1h", "mini"),
        ("wait>1000s or node=FORGE", "forge"),
        ("clock>=2.5GHz power>400W temp>70", "forge"),
        ("step:3.06s AND backend:mlx", "studio mbp"),
    ],
)
def test_it_keeps_what_was_asked_for(text: str, nodes: str) -> None:
    assert kept(text) == nodes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a tok/x<3", "column 3: 'tok/x' is not a field here; one of node state rank"),
        ("tok/s<", "column 7: a value is missing after tok/s<, such as 100, 10k or 1.5M"),
        ("age<3x", "column 5: '3x' is not a valid time; age takes 3s, 200ms, 5m, 2h or 1d"),
        ("node<3", "column 5: node is not a number, so < can't compare it; use : = != or ~"),
        ("(a b", "column 1: this ( is not closed"),
        ("a or", "column 5: a term is missing here"),
        ('x "abc', 'column 3: this " is not closed'),
        ("a !b", "column 3: write ! only before ="),
        ("~" + "a" * 201, "column 2: a pattern may have at most 200 characters"),
        ("(" * 60, "column 41: nested deeper than 40 times"),
    ],
)
def test_what_is_wrong_names_its_column_and_what_would_be_right(text: str, said: str) -> None:
    with pytest.raises(TypedLineError) as error:
        fl.parse(text, table_schemas.FLEET)
    assert str(error.value).startswith(said)


NUMBERS: Table[float | None] = Table("numbers", (FilterField("x", "", lambda row: row, q.Kinds.COUNT),), str)


@pytest.mark.parametrize("operator", ["<", "<=", ">", ">=", "=", "!=", ":"])
def test_the_unknown_matches_no_comparison_and_no_number_only_itself(operator: str) -> None:
    found = fl.parse(f"x{operator}1", NUMBERS)
    assert not found.keeps(None)
    assert fl.parse("x:n/a", NUMBERS).keeps(None)
    assert fl.parse("x:nan", NUMBERS).keeps(float("nan"))
    assert found.keeps(float("nan")) == (operator == "!=")


def test_a_number_equals_all_that_reads_as_it() -> None:
    assert fl.parse("x=3.1", NUMBERS).kept([3.05, 3.06, 3.1, 3.149, 3.16]) == [3.06, 3.1, 3.149]
    assert fl.parse("x=3", NUMBERS).kept([2.0, 3, 4]) == [3]
    assert fl.parse("x=10k", NUMBERS).kept([9_400, 9_600, 10_400, 10_600]) == [9_600, 10_400]


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
COMPARISONS = st.one_of(
    st.builds(fl.Compare, st.just("node"), st.sampled_from([":", "=", "!="]), WORDS),
    st.builds(fl.Compare, st.just("state"), st.sampled_from([":", "!="]), st.sampled_from(["run", "lost", "n/a"])),
    st.builds(fl.Compare, st.just("tok/s"), st.sampled_from(["<", "<=", ">", ">="]), st.sampled_from(["1", "1.5k"])),
)
LEAVES = st.one_of(
    st.builds(fl.Word, WORDS), COMPARISONS, st.builds(fl.Pattern, st.sampled_from(["a|b", "(x )y", "\\d+", "^m"]))
)


def joined(kind: type[fl.And] | type[fl.Or], terms: list[fl.Term]) -> fl.Term:
    flat = tuple(inner for term in terms for inner in (term.terms if isinstance(term, kind) else (term,)))
    return kind(flat) if len(flat) > 1 else flat[0]


TERMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(fl.Not, inner),
        st.lists(inner, min_size=2, max_size=3).map(lambda terms: joined(fl.And, terms)),
        st.lists(inner, min_size=2, max_size=3).map(lambda terms: joined(fl.Or, terms)),
    ),
    max_leaves=8,
)


@given(TERMS)
def test_what_is_printed_parses_to_the_same(term: fl.Term) -> None:
    assert fl.parse(show(term), table_schemas.FLEET).term == term


PIECES = st.sampled_from(["tok/s", "state", "<", ">=", "!=", ":", "~", "(", ")", '"', "'", "\\", "-", "or", "not", " ",
                          "10k", "n/a", "*", "[", "{9}", "a"])  # fmt: skip


@settings(max_examples=300)
@given(st.one_of(st.lists(PIECES, max_size=14).map("".join), st.text(max_size=60)))
def test_whatever_is_typed_it_filters_or_says_what_is_wrong(text: str) -> None:
    for table in TABLES:
        try:
            found = fl.parse(text, table)
        except TypedLineError as error:
            assert 1 <= error.column <= len(text) + 1
        else:
            assert fl.parse(show(found.term), table).term == found.term


def test_the_unknown_is_sorted_last_either_way_and_equals_keep_their_order() -> None:
    def order(wanted: q.SortOrder) -> str:
        return " ".join(row.view.node for row in q.in_order(ROWS, wanted, table_schemas.FLEET))

    assert order(q.SortOrder()) == "studio mbp forge mini"
    assert order(q.SortOrder(falling=True)) == "mini forge mbp studio"
    assert order(q.SortOrder("tok/s")) == "mbp studio forge mini"
    assert order(q.SortOrder("tok/s", falling=True)) == "forge studio mbp mini"
    assert order(q.SortOrder("backend")) == "studio mbp forge mini"
    assert order(q.SortOrder("node")) == "forge mbp mini studio"


def with_values(row: Row, **values: float) -> Row:
    named = {f"user:{name}": value for name, value in values.items()}
    return replace(row, step=msgspec.structs.replace(row.step, values=named)) if row.step is not None else row


OWN = table_schemas.fleet(("user:a", "user:a/b", "user:reward"))


@pytest.mark.parametrize(
    ("text", "field", "kept"),
    [
        ("user:reward>1", "user:reward", [1]),
        ("not user:reward<1", "user:reward", [1]),
        ("user:a=1", "user:a", [0, 1]),
        ("user:a/b:2", "user:a/b", [0]),
    ],
)
def test_a_metric_of_the_run_is_a_field_by_its_whole_name(text: str, field: str, kept: list[int]) -> None:
    first, second = [row for row in ROWS if row.step is not None][:2]
    told = [
        with_values(first, reward=0.5, a=1.0, **{"a/b": 2.0}),
        with_values(second, reward=1.5, a=1.0, **{"a/b": 3.0}),
    ]
    parsed = fl.parse(text, OWN)
    assert field in repr(parsed.term)
    assert parsed.kept(told) == [told[place] for place in kept]


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("user:reward", 12, "a comparison is missing after user:reward, such as user:reward<100"),
        ("user:other>1", 1, "'user' is not a field here; one of .* user:a user:a/b user:reward"),
    ],
)
def test_a_metric_that_is_not_there_or_not_compared_is_said_with_those_that_are(
    text: str, column: int, says: str
) -> None:
    with pytest.raises(TypedLineError, match=says) as error:
        fl.parse(text, OWN)
    assert error.value.column == column


def test_events_and_runs_have_fields_of_their_own() -> None:
    event = m.Event(
        id=1, at=0, severity="warning", by="anna", data=MicroBatchChanged((("forge", 4),), (("forge", 8),)), step=120,
        verb="resize-batch", outcome="applied",
    )  # fmt: skip
    row = table_schemas.EventRow(event, 60.0, ("forge",), effect=-0.12)
    for text in ("by:anna verb:resize-batch", "step>100 outcome:applied", "node:forge severity:warning", "effect<-5%",
                 "age=1m before:4 after=8", "not is:undone", "resize"):  # fmt: skip
        assert fl.parse(text, table_schemas.EVENTS).keeps(row), text
    assert not fl.parse("kind:run or effect>0", table_schemas.EVENTS).keeps(row)
    summary = m.RunSummary("tiny-1", "tiny", "failed", 3, 2_000, None, 0.0, "/runs/tiny", "atlas", ("atlas", "mbp"))
    run = table_schemas.RunRow(summary, 7200.0, 30.0)
    for text in ("state:failed", "done<1%", "loss:n/a", "age:2h duration<1m", "lead=atlas node:mbp", "tiny"):
        assert fl.parse(text, table_schemas.RUNS).keeps(run), text
