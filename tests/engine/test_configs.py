"""Cache and device configurations, ranks and the group of one, as the documentation shows them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from llm.support import PATIENCE

import infinilm
from engine.support import Foreign
from infinilm import (
    CacheConfig,
    CacheFullError,
    CommunicationGroup,
    ConfigError,
    DeviceError,
    DistConfig,
    LlamaConfig,
    PagedCacheConfig,
    PagedKVCacheConfig,
    RankInfo,
    StaticKVCacheConfig,
)

CONFIGS = [
    StaticKVCacheConfig(),
    StaticKVCacheConfig(3, 70),
    PagedKVCacheConfig(2**20),
    PagedKVCacheConfig(num_blocks=9),
]


# ---- caches ----


def test_the_abstract_configuration_cannot_be_constructed() -> None:
    with pytest.raises(NotImplementedError, match="StaticKVCacheConfig"):
        CacheConfig()
    assert repr(CacheConfig.__new__(CacheConfig)) == "<CacheConfig (abstract)>"


def test_static() -> None:
    default = StaticKVCacheConfig()
    assert (default.max_batch_size, default.max_cache_len) == (1, 2**64 - 1)
    config = StaticKVCacheConfig(max_batch_size=np.int32(4), max_cache_len=128)
    assert (config.max_batch_size, config.max_cache_len) == (4, 128)
    assert type(config.max_batch_size) is int
    assert repr(config) == "<StaticKVCacheConfig>"


def test_paged() -> None:
    assert PagedCacheConfig is PagedKVCacheConfig
    config = PagedKVCacheConfig(2**20)
    assert (config.max_kv_memory_bytes, config.block_size, config.num_blocks, config.dtype) == (2**20, 16, None, None)
    config = PagedKVCacheConfig(num_blocks=7, block_size=4, dtype="torch.bfloat16")  # type: ignore[arg-type]
    assert (config.num_blocks, config.block_size, config.dtype) == (7, 4, "bfloat16")
    assert repr(config) == "<PagedKVCacheConfig>"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations_are_immutable_and_copies_equal(config: CacheConfig) -> None:
    assert isinstance(config, CacheConfig)
    for name in [field.name for field in dataclasses.fields(config)]:  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 1)
    for made in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert made == config
        assert hash(made) == hash(config)
        assert made is not config


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, None, 2**64], ids=str)
def test_values_out_of_range(value: Any) -> None:
    for make, name in (
        (lambda: StaticKVCacheConfig(max_batch_size=value), "max_batch_size"),
        (lambda: StaticKVCacheConfig(max_cache_len=value), "max_cache_len"),
        (lambda: PagedKVCacheConfig(2**20, block_size=value or 0), "block_size"),
        (lambda: PagedKVCacheConfig(value), "max_kv_memory_bytes"),
        (lambda: PagedKVCacheConfig(num_blocks=value), "num_blocks"),
    ):
        with pytest.raises(ConfigError, match=name):
            make()


def test_exactly_one_of_bytes_and_blocks() -> None:
    with pytest.raises(ConfigError, match="neither"):
        PagedKVCacheConfig()
    with pytest.raises(ConfigError, match="both"):
        PagedKVCacheConfig(100, num_blocks=3)
    with pytest.raises(ConfigError, match="int3"):
        PagedKVCacheConfig(100, dtype="int3")


def layout(config: CacheConfig) -> tuple[str, int, int]:
    made = config.layout(max_position_embeddings=100, kv_bytes_per_token=24, dtype="float16")
    return made.kind, made.num_blocks, made.block_size


def test_layouts() -> None:
    assert layout(StaticKVCacheConfig()) == ("static", 1, 100)
    assert layout(StaticKVCacheConfig(5, 64)) == ("static", 5, 64)
    assert layout(PagedKVCacheConfig(24 * 16 * 3 - 1)) == ("paged", 2, 16)
    assert layout(PagedKVCacheConfig(24 * 16 * 3)) == ("paged", 3, 16)
    assert layout(PagedKVCacheConfig(num_blocks=3, block_size=1, dtype="float16")) == ("paged", 3, 1)
    assert layout(StaticKVCacheConfig(5, 64).default(100)) == ("static", 1, 100)
    assert layout(PagedKVCacheConfig(num_blocks=3, block_size=7).default(100)) == ("paged", 15, 7)


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(CacheFullError, match=f"max_kv_memory_bytes=383.* {24 * 16} bytes"):
        layout(PagedKVCacheConfig(383))
    for config in (StaticKVCacheConfig(2**40, 2**40), PagedKVCacheConfig(num_blocks=2**63), PagedKVCacheConfig(2**63)):
        with pytest.raises(CacheFullError, match="no machine"):
            layout(config)


def test_a_row_beyond_the_model_warns(caplog: pytest.LogCaptureFixture) -> None:
    layout(StaticKVCacheConfig(1, 100))
    assert not caplog.text
    layout(StaticKVCacheConfig(1, 101))
    assert "max_cache_len=101" in caplog.text


# ---- devices ----


def test_devices() -> None:
    assert DistConfig().tp_device_ids == [0]
    assert DistConfig(tp_size=4).tp_device_ids == DistConfig(4).tp_device_ids == [0, 1, 2, 3]
    config = DistConfig(tp_device_ids=(0, np.int64(2)))
    assert str(config) == repr(config) == "DistConfig(tp_device_ids=[0, 2])"
    assert config.tp_size == 2
    config.tp_device_ids = [5, 1, 3]
    assert config.tp_device_ids == [5, 1, 3]
    assert config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    assert config != DistConfig()


def test_devices_that_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="not both"):
        DistConfig(tp_size=2, tp_device_ids=[0, 1])
    for bad in (0, -1):
        with pytest.raises(ConfigError, match="tp_size"):
            DistConfig(bad)
    with pytest.raises(ConfigError, match="empty"):
        DistConfig(tp_device_ids=[])
    for ids in ("01", 3, [0.5], [True], [None]):
        with pytest.raises(TypeError, match="tp_device_ids"):
            DistConfig(tp_device_ids=ids)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="tp_device_ids"):
            DistConfig().tp_device_ids = ids  # type: ignore[assignment]
    with pytest.raises(TypeError, match="tp_size"):
        DistConfig(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([-1], ConfigError, "-1"),
        ([0, 1, 0], ConfigError, "twice"),
        ([3], DeviceError, "no device 3"),
        ([0, 2], DeviceError, "no device 2.*tp_size=2"),
    ],
    ids=str,
)
def test_devices_that_the_engine_refuses(ids: list[int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CommunicationGroup(DistConfig(tp_device_ids=ids))
    with pytest.raises(error, match=message):
        infinilm.InferEngine(LlamaConfig(), DistConfig(tp_device_ids=ids), "cpu")


# ---- ranks ----


def test_a_group_of_one() -> None:
    group = CommunicationGroup()
    assert group.tp_size == 1
    assert group.ranks == (RankInfo(tp_rank=0, tp_size=1, device="cpu"),)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for got in (group.all_reduce(x), group.all_reduce(x, "max"), group.all_gather(x, axis=1), group.broadcast(x)):
        assert np.array_equal(got.numpy(), x)
        assert np.shares_memory(got.numpy(), x)
    group.barrier()


def test_a_group_refuses_bad_arguments() -> None:
    group, x = CommunicationGroup(), np.zeros((2, 3), np.float32)
    for call, message in (
        (lambda: group.all_reduce(x, "mean"), "op"),
        (lambda: group.all_gather(x, axis=2), "axis"),
        (lambda: group.broadcast(x, src=1), "src"),
        (lambda: CommunicationGroup(device_type="tpu"), "device_type"),
        (lambda: RankInfo(1, 1), "tp_rank"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    for call, message in (
        (lambda: group.all_reduce([1.0]), "all_reduce"),
        (lambda: group.broadcast(x, src=0.5), "src"),  # type: ignore[arg-type]
        (lambda: CommunicationGroup([0]), "DistConfig"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(DeviceError, match="all_gather"):
        group.all_gather(Foreign())


def test_a_group_of_several() -> None:
    group = CommunicationGroup(DistConfig(3))
    assert group.ranks == tuple(RankInfo(rank, 3, "cpu") for rank in range(3))
    x = np.zeros(2, np.float32)
    for call in (lambda: group.all_reduce(x), lambda: group.all_gather(x), lambda: group.broadcast(x), group.barrier):
        with pytest.raises(ConfigError, match="3 ranks, whose operations run inside an engine"):
            call()


# ---- names ----


def test_names_are_at_the_top_and_in_their_modules() -> None:
    code = (
        "import infinilm\n"
        "assert infinilm.cache.StaticKVCacheConfig is infinilm.StaticKVCacheConfig\n"
        "assert infinilm.distributed.DistConfig is infinilm.DistConfig\n"
        "assert infinilm.engine.infer_engine.InferEngine is infinilm.InferEngine\n"
        "assert infinilm.engine.hooks.HookRegistry is infinilm.HookRegistry\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, cwd="/")
