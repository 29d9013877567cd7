"""The variables that run files may set: none by which a library, a compiler or an interpreter finds code."""

from pathlib import Path

import pytest

from trainctl.protocol.config import env_policy
from trainctl.protocol.errors import InvalidInputError

LOADERS = (
    "LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "DYLD_INSERT_LIBRARIES", "DYLD_LIBRARY_PATH", "PATH", "HOME", "TMPDIR",
    "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONUSERBASE", "OPENSSL_CONF", "OPENSSL_MODULES", "GCONV_PATH",
    "TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS_OUT", "TORCH_EXTENSIONS_DIR", "TORCH_HOME", "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH", "TRITON_OVERRIDE_DIR", "CUDA_HOME", "CUDA_PATH", "CUDA_INJECTION64_PATH", "CPATH", "CC", "CXX",
    "LIBRARY_PATH", "HF_HOME", "HF_MODULES_CACHE", "XDG_CACHE_HOME", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN",
    "KINETO_CONFIG", "PYTORCH_JIT_LOG_LEVEL", "BASH_ENV", "GIO_EXTRA_MODULES", "LOCPATH", "MALLOC_CONF",
)  # fmt: skip


@pytest.mark.parametrize("name", LOADERS)
def test_a_variable_by_which_code_is_found_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^nodes\.a\.env\.{name}: a run file may not set it"):
        env_policy.of_trainers({}, {"OMP_NUM_THREADS": "1", name: "/planted"}, "nodes.a.env")


def test_a_machine_s_owner_allows_more() -> None:
    owner = {"TRAINCTL_ALLOWED_VARIABLES": "HF_HOME, MY_SETTING", "HF_HOME": "/theirs"}
    found = env_policy.of_trainers(owner, {"HF_HOME": "/mine", "MY_SETTING": "ü=$x"})
    assert (found["HF_HOME"], found["MY_SETTING"]) == ("/mine", "ü=$x")
    assert env_policy.of_trainers(owner, {})["HF_HOME"] == "/theirs", "what the owner sets is inherited"
    with pytest.raises(InvalidInputError, match="TORCH_HOME"):
        env_policy.of_trainers(owner, {"TORCH_HOME": "/planted"})


def test_the_page_lists_them_all() -> None:
    page = (Path(__file__).parents[3] / "docs" / "services.md").read_text("utf-8")
    assert all(f"`{name}`" in page for name in env_policy.ALLOWED)
