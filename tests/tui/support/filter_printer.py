"""Prints terms of the filter language, so that tests can hold parsing against its inverse."""

from trainctl.tui.state.filter_language import And, Compare, Not, Or, Pattern, Term, Word

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
