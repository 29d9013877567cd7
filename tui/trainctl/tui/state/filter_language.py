"""The filter language of `/`: `tok/s<100 state:stale`, parsed and matched against a table's rows.

Terms side by side must all hold; `or`, `not` (or `-` in front) and parentheses as usual. A bare or "quoted" word is
looked for in all of a row's text, `~pattern` as a regular expression; `field<value` compares one field. Names of fields
may have signs in them: `user:reward>1` compares `user:reward` where there is such a field. What is unknown matches no
comparison but `field:n/a`. docs/filters.md describes it for users.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.state.table_fields import OPERATORS, Table, Test, ValueProblem, pattern_of, test_of

R = TypeVar("R")
_DEEPEST = 40
_MARKS = frozenset("<>=!:~")


class TypedLineError(InvalidInputError):
    """A fault in a line that was typed, such as a filter, and in which column of it (from 1)."""

    def __init__(self, column: int, problem: str) -> None:
        super().__init__(f"column {column}", problem)
        self.column = column


def _never(_: object) -> bool:
    return False


@dataclass(frozen=True)
class Word:
    """Looked for in all of a row's text, whatever the case."""

    text: str


@dataclass(frozen=True)
class Pattern:
    """A regular expression over all of a row's text."""

    source: str
    test: Test = field(default=_never, compare=False, repr=False)


@dataclass(frozen=True)
class Compare:
    """One field against a value as it was typed."""

    name: str
    operator: str
    value: str
    test: Test = field(default=_never, compare=False, repr=False)


@dataclass(frozen=True)
class Not:
    term: "Term"


@dataclass(frozen=True)
class And:
    """All of them; of none: everything."""

    terms: "tuple[Term, ...]" = ()


@dataclass(frozen=True)
class Or:
    terms: "tuple[Term, ...]"


Term = Word | Pattern | Compare | Not | And | Or


@dataclass(frozen=True)
class Filter(Generic[R]):
    """A filter that was understood."""

    text: str
    term: Term
    table: Table[R]

    def keeps(self, row: R) -> bool:
        return _holds(self.term, row, self.table)

    @property
    def sought(self) -> list[re.Pattern[str]]:
        """Return the words and patterns that rows are searched for, but for what is excluded."""
        return [re.compile(source, re.IGNORECASE) for source in _sources(self.term)]

    def kept(self, rows: Sequence[R]) -> list[R]:
        return list(rows) if self.term == And() else [row for row in rows if self.keeps(row)]


def parse(text: str, table: Table[R]) -> Filter[R]:
    """Raise TypedLineError naming the column and what would be right there."""
    return Filter(text.strip(), _Parser(text, table).whole(), table)


def _sources(term: Term) -> list[str]:
    match term:
        case Word(text):
            return [re.escape(text)]
        case Pattern(source) | Compare("text", "~", source):
            return [source]
        case Compare("text", ":" | "=", text):
            return [re.escape(text)]
        case And(terms) | Or(terms):
            return [source for inner in terms for source in _sources(inner)]
        case _:
            return []


def _holds(term: Term, row: R, table: Table[R]) -> bool:
    match term:
        case Word(text):
            return text.casefold() in table.words(row).casefold()
        case Pattern():
            return term.test(table.words(row))
        case Compare(name):
            known = table.find(name)
            return known is not None and term.test(known.get(row))
        case Not(inner):
            return not _holds(inner, row, table)
        case And(terms):
            return all(_holds(inner, row, table) for inner in terms)
        case Or(terms):
            return any(_holds(inner, row, table) for inner in terms)


class _Parser(Generic[R]):
    """Recursive descent over the characters; `at` is the next one, its column `at + 1`."""

    def __init__(self, text: str, table: Table[R]) -> None:
        self._text, self._table, self._at = text, table, 0
        self._depth = 0

    def whole(self) -> Term:
        self._skip()
        if not self._left:
            return And()
        term = self._either()
        if self._left:
            raise self._wrong("this ) has no matching (")
        return term

    # -------------------------------------------------------- or, and, not

    def _either(self) -> Term:
        terms = [self._all()]
        while self._keyword("or"):
            terms.append(self._all())
        return terms[0] if len(terms) == 1 else Or(_flat(terms, Or))

    def _all(self) -> Term:
        terms = [self._one()]
        while self._left and self._text[self._at] != ")" and self._peek() != "or":
            self._keyword("and")
            terms.append(self._one())
        return terms[0] if len(terms) == 1 else And(_flat(terms, And))

    def _one(self) -> Term:
        self._skip()
        if not self._left or self._text[self._at] == ")" or self._peek() in ("or", "and"):
            raise self._wrong("a term is missing here, such as a word or state:run")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._wrong(f"nested deeper than {_DEEPEST} times")
        term = self._primary()
        self._depth -= 1
        self._skip()
        return term

    def _primary(self) -> Term:
        char = self._text[self._at]
        if self._keyword("not"):
            return Not(self._one())
        if char == "-" and self._left > 1 and not self._text[self._at + 1].isspace():
            self._at += 1
            return Not(self._one())
        if char == "(":
            return self._group()
        if char in "\"'":
            return Word(self._string())
        if char == "~":
            self._at += 1
            start = self._at
            source = self._read_value("~")
            return Pattern(source, self._checked_pattern(source, start))
        return self._word_or_field()

    def _group(self) -> Term:
        opened = self._at
        self._at += 1
        term = self._either()
        if not self._left:
            raise TypedLineError(opened + 1, "this ( is not closed")
        self._at += 1
        return term

    # -------------------------------------------------------- words, fields and values

    def _word_or_field(self) -> Term:
        start = self._at
        name = self._read_field() or self._read_word()
        operator = next((item for item in OPERATORS if self._text.startswith(item, self._at)), "")
        if not operator:
            if self._left and self._text[self._at] == "!":
                raise self._wrong("write ! only before =, as in state!=run; use not to exclude a term")
            if len(name) > 2 and name[0] == name[-1] == "/":
                raise TypedLineError(start + 1, f"write the pattern as ~{name[1:-1]}, or the text as {name!r}")
            return Word(name)
        if self._table.find(name) is None:
            said = f"{name!r} is not a field here" if name else f"a field is missing before {operator}"
            raise TypedLineError(start + 1, f"{said}; one of {self._table.names}")
        at_operator = self._at
        self._at += len(operator)
        return self._compare(name, operator, at_operator)

    def _compare(self, name: str, operator: str, at_operator: int) -> Compare:
        known = self._table.find(name)
        assert known is not None
        start = self._at
        value = self._read_value(f"{name}{operator}", known.kind.value.example if known.kind else known.states[:1])
        try:
            return Compare(known.name, operator, value, test_of(known, operator, value))
        except ValueProblem as problem:
            raise TypedLineError((at_operator if problem.at_operator else start) + 1, str(problem)) from None

    def _checked_pattern(self, source: str, start: int) -> Test:
        try:
            pattern = pattern_of(source)
        except ValueProblem as problem:
            raise TypedLineError(start + 1, str(problem)) from None
        return lambda value: isinstance(value, str) and pattern.search(value) is not None

    def _read_field(self) -> str:
        """Return the longest name of a field that an operator follows; nothing where there is none."""
        text = self._text[self._at :].lower()
        known = [name for field in self._table.fields for name in (field.name, *field.aliases)]
        compared = (name for name in known if text.startswith(name) and text.startswith(OPERATORS, len(name)))
        words = max(compared, key=len, default="")
        whole = next((name for name in known if _MARKS & set(name) and text.split(None, 1)[:1] == [name]), "")
        if whole and not words:
            raise TypedLineError(
                self._at + len(whole) + 1, f"a comparison is missing after {whole}, such as {whole}<100"
            )
        self._at += len(words)
        return words

    def _read_word(self) -> str:
        start = self._at
        while self._left and not self._ends_word(self._text[self._at]):
            self._at += 1
        return self._text[start : self._at]

    @staticmethod
    def _ends_word(char: str) -> bool:
        return char.isspace() or char in "()\"'" or char in _MARKS

    def _read_value(self, after: str, example: str | Sequence[str] = ()) -> str:
        """Return a quoted string, or all up to a blank or a parenthesis that closes another one."""
        if self._left and self._text[self._at] in "\"'":
            return self._string()
        start, depth = self._at, 0
        while self._left and not self._text[self._at].isspace():
            depth += {"(": 1, ")": -1}.get(self._text[self._at], 0)
            if depth < 0:
                break
            self._at += 1
        if self._at == start:
            such = f", such as {example if isinstance(example, str) else ' '.join(example)}" if example else ""
            raise self._wrong(f"a value is missing after {after}{such}")
        return self._text[start : self._at]

    def _string(self) -> str:
        opened, quote = self._at, self._text[self._at]
        self._at += 1
        made = []
        while self._left and self._text[self._at] != quote:
            if self._text[self._at] == "\\" and self._text[self._at + 1 : self._at + 2] in (quote, "\\"):
                self._at += 1
            made.append(self._text[self._at : self._at + 1])
            self._at += 1
        if not self._left:
            raise TypedLineError(opened + 1, f"this {quote} is not closed")
        self._at += 1
        return "".join(made)

    # -------------------------------------------------------- characters

    @property
    def _left(self) -> int:
        return len(self._text) - self._at

    def _skip(self) -> None:
        while self._left and self._text[self._at].isspace():
            self._at += 1

    def _peek(self) -> str:
        """Return the word that comes next in small letters, empty if it is a field's."""
        end = self._at
        while end < len(self._text) and not self._ends_word(self._text[end]):
            end += 1
        is_field = end < len(self._text) and self._text[end] in _MARKS
        return "" if is_field else self._text[self._at : end].lower()

    def _keyword(self, word: str) -> bool:
        if self._peek() != word:
            return False
        self._at += len(word)
        self._skip()
        return True

    def _wrong(self, problem: str) -> TypedLineError:
        return TypedLineError(self._at + 1, problem)


def _flat(terms: Sequence[Term], kind: type[And] | type[Or]) -> tuple[Term, ...]:
    made: list[Term] = []
    for term in terms:
        made += term.terms if isinstance(term, kind) else (term,)
    return tuple(made)
