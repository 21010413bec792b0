"""The numcodecs codec: round trips, Zarr v2 arrays, configurations, invalid input."""

import json

import exmy
import numcodecs
import numpy as np
import pytest
import zarr
from exmy.numcodecs import Exmy
from zarr.storage import MemoryStore

CONFIGURATIONS = [
    {"format": "e4m3"},
    {"format": "e3m2", "scale": "max", "axis": -1},
    {"format": "e2m1", "scale": "float", "axis": 0, "block": 16},
]


def weights(shape, dtype="float32"):
    return np.random.default_rng(1).standard_t(4, shape).astype(exmy.elements.output_dtype(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_a_codec_by_its_configuration(dtype, configuration):
    codec = numcodecs.get_codec({"id": "exmy", **configuration})
    assert codec.get_config() == json.loads(json.dumps({"id": "exmy", **configuration}))
    assert numcodecs.get_codec(codec.get_config()) == codec
    x = weights((32, 5), dtype)
    expected = exmy.quantize(x, **{"f" if k == "format" else k: v for k, v in configuration.items()})
    data = codec.encode(x)
    assert data == expected.to_bytes()
    result = codec.decode(data)
    assert (result.dtype, result.shape) == (x.dtype, x.shape)
    assert result.tobytes() == expected.dequantize(dtype).tobytes()
    out = np.empty(x.shape, x.dtype)
    assert codec.decode(data, out=out) is out
    assert out.tobytes() == result.tobytes()
    memory = bytearray(x.nbytes)
    codec.decode(memoryview(data), out=memory)
    assert memory == result.tobytes()


@pytest.mark.parametrize(
    "codecs",
    [
        {"compressors": Exmy("e3m2", axis=-1)},
        {"filters": [Exmy("e3m2", axis=-1)], "compressors": None},
        {"filters": [Exmy("e3m2", axis=-1)], "compressors": numcodecs.Zstd()},
    ],
    ids=["compressor", "filter", "filter and compressor"],
)
def test_arrays_of_zarr_v2(codecs):
    x = weights((40, 30))
    store = MemoryStore()
    array = zarr.create_array(
        store, shape=x.shape, dtype=x.dtype, chunks=(20, 30), zarr_format=2, **{"filters": None, **codecs}
    )
    array[...] = x
    result = zarr.open_array(store, mode="r")
    expected = [exmy.quantize(part, "e3m2", axis=-1).dequantize() for part in (x[:20], x[20:])]
    np.testing.assert_array_equal(result[...], np.concatenate(expected))
    np.testing.assert_array_equal(result[15:25, 7], np.concatenate(expected)[15:25, 7])


@pytest.mark.parametrize(
    "bad", [np.arange(4), np.zeros(3, bool), np.array(["a", None], object), b"bytes"], ids=str
)
def test_arrays_of_other_dtypes_are_refused(bad):
    with pytest.raises(exmy.DtypeError, match="float32"):
        Exmy("e4m3").encode(bad)


def test_nan_and_blocks_that_do_not_fit_are_refused():
    with pytest.raises(exmy.NonFiniteError):
        Exmy("e4m3").encode(np.array([1, np.inf], np.float32))
    with pytest.raises(exmy.SizeError, match="blocks of 16"):
        Exmy("e4m3", block=16).encode(np.ones((3, 17), np.float32))
    with pytest.raises(exmy.SizeError, match="order"):
        Exmy("e4m3").encode(np.ones((3, 17), np.float32, order="F"))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"format": "e4m3", "level": 2}, "'level'"),
        ({}, "has no format"),
        ({"format": "float8"}, "float8"),
        ({"format": "e4m3", "scale": "maximum"}, "'maximum'"),
    ],
    ids=str,
)
def test_unknown_configurations_are_refused(config, says):
    with pytest.raises(exmy.FormatError, match=says):
        numcodecs.get_codec({"id": "exmy", **config})


def test_bad_bytes_and_memory_are_refused():
    codec, x = Exmy("e4m3"), np.ones(16, np.float32)
    data = codec.encode(x)
    with pytest.raises(exmy.SizeError, match="truncated"):
        codec.decode(data[:-1])
    with pytest.raises(exmy.FormatError):
        codec.decode(b"nonsense" * 8)
    for out in (np.empty(15, np.float32), np.empty((16, 2), np.float32)[:, 0], bytes(64)):
        with pytest.raises(exmy.SizeError):
            codec.decode(data, out=out)
