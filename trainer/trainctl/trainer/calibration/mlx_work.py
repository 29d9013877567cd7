"""Matrix products and copies by MLX."""

import contextlib
from collections.abc import Callable, Iterator

import mlx.core as mx

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


class MlxWork:
    """On MLX's default device, which the backend has chosen."""

    def dtypes(self) -> tuple[str, ...]:
        return tuple(_DTYPES)

    def product(self, dtype: str, size: int) -> Callable[[], None]:
        one, other = (mx.ones((size, size), _DTYPES[dtype]) for _ in range(2))
        mx.eval(one, other)

        def run() -> None:
            mx.eval(one @ other)

        return run

    def copy(self, size_bytes: int) -> Callable[[], None]:
        block = mx.ones((size_bytes // 4,), mx.float32)
        mx.eval(block)

        def run() -> None:
            mx.eval(mx.negative(block))

        return run

    @contextlib.contextmanager
    def one_core(self) -> Iterator[bool]:
        """MLX doesn't let a program choose its threads."""
        yield False
