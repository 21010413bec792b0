/* exmy._kernels: the Python bindings of the eXmY loops, which run on contiguous buffers and release the GIL.
 *
 * The Python layer (kernels.py) validates arguments; the checks here only guard against access outside the buffers.
 * The first argument of every function is the level (0 baseline, 1 AVX2, 2 AVX-512); formats are three integers:
 * exponent bits, mantissa bits, bias. FORMAT.md specifies the results, _lanes.h explains the loops.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_search.h"

static const lanes *lanes_of(int level)
{
    const lanes *l = level_lanes(level);
    if (l == NULL)
        PyErr_Format(PyExc_ValueError, "this machine cannot run kernel level %d", level);
    return l;
}

static int check_format(int exponent_bits, int mantissa_bits, int bias)
{
    if (exponent_bits >= 0 && exponent_bits <= 8 && mantissa_bits >= 0 && mantissa_bits <= 15 &&
        1 + exponent_bits + mantissa_bits >= 2 && 1 + exponent_bits + mantissa_bits <= 16 && bias >= -512 &&
        bias <= 512)
        return 1;
    PyErr_Format(PyExc_ValueError, "invalid format e%dm%db%d", exponent_bits, mantissa_bits, bias);
    return 0;
}

static int check_kind(int kind)
{
    if (kind >= FLOAT16 && kind <= FLOAT64)
        return 1;
    PyErr_Format(PyExc_ValueError, "invalid kind of element: %d", kind);
    return 0;
}

static int check_length(const char *name, Py_ssize_t length, size_t expected)
{
    if ((size_t)length == expected)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, expected %zd", name, length, (Py_ssize_t)expected);
    return 0;
}

static size_t codes_bytes(size_t n, int bits, int packed)
{
    return packed ? packed_bytes(n, bits) : n * (bits <= 8 ? 1 : 2);
}

static PyObject *py_encode(PyObject *self, PyObject *args)
{
    int level, kind, x, y, bias, packed, saturate;
    Py_buffer src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiippy*w*", &level, &kind, &x, &y, &bias, &packed, &saturate, &src, &dst))
        return NULL;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind) && check_format(x, y, bias)) {
        const size_t n = (size_t)src.len / kind_size(kind);
        if (check_length("out", dst.len, codes_bytes(n, 1 + x + y, packed))) {
            nonfinites bad;
            Py_BEGIN_ALLOW_THREADS;
            bad = encode_all(l, spec_of(x, y, bias, 0), kind, src.buf, n, packed, saturate, dst.buf);
            Py_END_ALLOW_THREADS;
            result = Py_BuildValue("nn", (Py_ssize_t)bad.count, (Py_ssize_t)bad.first);
        }
    }
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_decode(PyObject *self, PyObject *args)
{
    int level, kind, x, y, bias, packed;
    Py_buffer src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiipy*w*", &level, &kind, &x, &y, &bias, &packed, &src, &dst))
        return NULL;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind) && check_format(x, y, bias)) {
        const size_t n = (size_t)dst.len / kind_size(kind);
        if (check_length("codes", src.len, codes_bytes(n, 1 + x + y, packed))) {
            Py_BEGIN_ALLOW_THREADS;
            decode_all(l, spec_of(x, y, bias, 0), kind, src.buf, n, packed, dst.buf);
            Py_END_ALLOW_THREADS;
            result = Py_BuildValue("");
        }
    }
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_round(PyObject *self, PyObject *args)
{
    int level, kind, x, y, bias, saturate;
    Py_buffer src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiipy*w*", &level, &kind, &x, &y, &bias, &saturate, &src, &dst))
        return NULL;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind) && check_format(x, y, bias) &&
        check_length("out", dst.len, (size_t)src.len)) {
        const size_t n = (size_t)src.len / kind_size(kind);
        nonfinites bad;
        Py_BEGIN_ALLOW_THREADS;
        bad = round_all(l, spec_of(x, y, bias, 0), kind, src.buf, n, saturate, dst.buf);
        Py_END_ALLOW_THREADS;
        result = Py_BuildValue("nn", (Py_ssize_t)bad.count, (Py_ssize_t)bad.first);
    }
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_repack(PyObject *args, int packing)
{
    int level, bits;
    Py_ssize_t count;
    Py_buffer src, dst;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "iiny*w*", &level, &bits, &count, &src, &dst))
        return NULL;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_format(0, bits > 0 ? bits - 1 : -1, 0) && count >= 0 &&
        check_length("codes", packing ? src.len : dst.len, codes_bytes((size_t)count, bits, 0)) &&
        check_length("packed", packing ? dst.len : src.len, packed_bytes((size_t)count, bits))) {
        Py_BEGIN_ALLOW_THREADS;
        (packing ? pack_all : unpack_all)(l, bits, src.buf, (size_t)count, dst.buf);
        Py_END_ALLOW_THREADS;
        result = Py_BuildValue("");
    } else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "count is negative");
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_pack(PyObject *self, PyObject *args)
{
    (void)self;
    return py_repack(args, 1);
}

static PyObject *py_unpack(PyObject *self, PyObject *args)
{
    (void)self;
    return py_repack(args, 0);
}

static PyObject *py_planes(PyObject *args, int joining)
{
    int level, bits;
    Py_ssize_t count;
    Py_buffer first, second, third;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, joining ? "iiny*y*w*" : "iiny*w*w*", &level, &bits, &count, &first, &second, &third))
        return NULL;
    const lanes *l = lanes_of(level);
    const Py_buffer *packed = joining ? &third : &first, *upper = joining ? &first : &second;
    const Py_buffer *lower = joining ? &second : &third;
    if (l == NULL)
        ;
    else if (count < 0 || bits <= 8 || bits > 16)
        PyErr_SetString(PyExc_ValueError, "count is negative, or bits are not 9 ... 16");
    else if (check_length("packed", packed->len, packed_bytes((size_t)count, bits)) &&
             check_length("upper", upper->len, packed_bytes((size_t)count, 8)) &&
             check_length("lower", lower->len, packed_bytes((size_t)count, bits - 8))) {
        Py_BEGIN_ALLOW_THREADS;
        if (joining)
            join_planes(l, bits, upper->buf, lower->buf, (size_t)count, packed->buf);
        else
            split_planes(l, bits, packed->buf, (size_t)count, upper->buf, lower->buf);
        Py_END_ALLOW_THREADS;
        result = Py_BuildValue("");
    }
    PyBuffer_Release(&first);
    PyBuffer_Release(&second);
    PyBuffer_Release(&third);
    return result;
}

static PyObject *py_split_planes(PyObject *self, PyObject *args)
{
    (void)self;
    return py_planes(args, 0);
}

static PyObject *py_join_planes(PyObject *self, PyObject *args)
{
    (void)self;
    return py_planes(args, 1);
}

static PyObject *py_peak(PyObject *self, PyObject *args)
{
    int level, kind;
    Py_buffer src;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiy*", &level, &kind, &src))
        return NULL;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind)) {
        const size_t n = (size_t)src.len / kind_size(kind);
        double peak;
        nonfinites bad = {0, 0};
        Py_BEGIN_ALLOW_THREADS;
        peak = peak_all(l, kind, src.buf, n);
        if (!(peak - peak == 0))
            count_nonfinite(kind, src.buf, n, &bad.count, &bad.first);
        Py_END_ALLOW_THREADS;
        result = Py_BuildValue("dnn", peak, (Py_ssize_t)bad.count, (Py_ssize_t)bad.first);
    }
    PyBuffer_Release(&src);
    return result;
}

/* Returns whether the scales cover the elements first ... first+n-1; sets an exception if they do not. */
static int check_scales(const groups *g, Py_ssize_t bytes, size_t n)
{
    const size_t most = SIZE_MAX / 4; /* of each term below, so that no sum overflows */
    if (g->length > 0 && g->inner > 0 && g->length <= most / g->inner && g->first <= most && n <= most) {
        const size_t ends = (g->first + n + g->length * g->inner - 1) / (g->length * g->inner);
        if ((size_t)bytes / (g->wide ? 8 : 4) / g->inner >= ends)
            return 1;
    }
    PyErr_SetString(PyExc_ValueError, "scales has too few bytes for these groups");
    return 0;
}

static PyObject *py_grouped(PyObject *args, int encoding)
{
    int level, kind, x, y, bias, option; /* one_zero of encode_groups, in_planes of decode_groups */
    groups g;
    Py_ssize_t length, inner, first;
    Py_buffer scales, src, dst;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "iiiiipnnny*y*w*p", &level, &kind, &x, &y, &bias, &g.wide, &length, &inner, &first,
                          &scales, &src, &dst, &option))
        return NULL;
    g.length = (size_t)length, g.inner = (size_t)inner, g.first = (size_t)first, g.scales = scales.buf;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind) && check_format(x, y, bias)) {
        const size_t n = (size_t)(encoding ? src.len : dst.len) / kind_size(kind);
        if (check_length("packed", encoding ? dst.len : src.len, packed_bytes(n, 1 + x + y)) &&
            check_scales(&g, scales.len, n)) {
            int finite = 1;
            Py_BEGIN_ALLOW_THREADS;
            if (encoding)
                finite = encode_groups(l, spec_of(x, y, bias, 0), kind, &g, option, src.buf, n, dst.buf);
            else
                decode_groups(l, spec_of(x, y, bias, 0), kind, &g, option && x + y >= 8, src.buf, n, dst.buf);
            Py_END_ALLOW_THREADS;
            result = encoding ? PyBool_FromLong(finite) : Py_BuildValue("");
        }
    }
    PyBuffer_Release(&scales);
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_encode_groups(PyObject *self, PyObject *args)
{
    (void)self;
    return py_grouped(args, 1);
}

static PyObject *py_decode_groups(PyObject *self, PyObject *args)
{
    (void)self;
    return py_grouped(args, 0);
}

static PyObject *py_supports(PyObject *self, PyObject *args)
{
    int level;
    (void)self;
    if (!PyArg_ParseTuple(args, "i", &level))
        return NULL;
    return PyBool_FromLong(level_lanes(level) != NULL);
}

#include "_bindings.h"
#include "_search_bindings.h"
#include "_step.h"
#include "_step_bindings.h"

static PyMethodDef methods[] = {
    {"supports", py_supports, METH_VARARGS, "supports(level) -> bool: whether this machine runs the level."},
    {"encode", py_encode, METH_VARARGS,
     "encode(level, kind, x, y, bias, packed, saturate, src, out) -> (count, first) of non-finite values."},
    {"decode", py_decode, METH_VARARGS, "decode(level, kind, x, y, bias, packed, codes, out)."},
    {"round", py_round, METH_VARARGS,
     "round(level, kind, x, y, bias, saturate, src, out) -> (count, first) of non-finite values."},
    {"pack", py_pack, METH_VARARGS, "pack(level, bits, count, codes, out)."},
    {"unpack", py_unpack, METH_VARARGS, "unpack(level, bits, count, packed, out)."},
    {"split_planes", py_split_planes, METH_VARARGS, "split_planes(level, bits, count, packed, upper, lower)."},
    {"join_planes", py_join_planes, METH_VARARGS, "join_planes(level, bits, count, upper, lower, packed)."},
    {"peak", py_peak, METH_VARARGS, "peak(level, kind, src) -> (largest magnitude, count, first)."},
    {"encode_groups", py_encode_groups, METH_VARARGS,
     "encode_groups(level, kind, x, y, bias, wide, length, inner, first, scales, src, out, one_zero) -> whether all "\
     "scaled values are finite."},
    {"decode_groups", py_decode_groups, METH_VARARGS,
     "decode_groups(level, kind, x, y, bias, wide, length, inner, first, scales, packed, out, in_planes)."},
    SEARCH_METHODS,
    ARRAY_METHODS,
    STEP_METHODS,
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "exmy._kernels", "The eXmY loops on contiguous buffers.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void)
{
    highest_level = find_highest_level();
    return PyModuleDef_Init(&definition);
}
