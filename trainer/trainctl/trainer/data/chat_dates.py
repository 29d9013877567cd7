"""The date in chat templates that write today's: always the same, so that tokens don't depend on the day.

Such templates call `strftime_now(format)`, a function of transformers. A macro of the same name takes its place.
"""

import datetime

TEMPLATE_DATE = datetime.datetime(2025, 1, 1)
_NAME = "strftime_now"
_CODES = "aAbBdefHIjklmMpSTuUwWyYDF"


def dated(template: str) -> str:
    """A chat template with TEMPLATE_DATE in place of today."""
    if _NAME not in template:
        return template
    macro = f"{{% macro {_NAME}(format) %}}{{{{ format{_replacements()} }}}}{{% endmacro %}}"
    return macro + '{{ "" }}' + template  # the empty text keeps a line feed with which the template may begin


def _replacements() -> str:
    """Filters that replace each code of a format, with the padding and without."""
    codes = [f"%{sign}{code}" for code in _CODES for sign in ("-", "")]
    return "".join(f' | replace("{code}", "{_value(code)}")' for code in codes)


def _value(code: str) -> str:
    value = TEMPLATE_DATE.strftime(code.replace("-", ""))
    return (value.lstrip("0 ") or "0") if "-" in code and code[-1] in "deHIjklmMSy" else value
