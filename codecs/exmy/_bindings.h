/* The functions of _arrays.h for Python; included by _kernels.c after its checks. */

static PyObject *py_stochastic(PyObject *self, PyObject *args)
{
    int level, kind, x, y, bias, target, saturate;
    unsigned long long seed, first;
    Py_buffer src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiiKKipy*w*", &level, &kind, &x, &y, &bias, &seed, &first, &target, &saturate,
                          &src, &dst))
        return NULL;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind) && check_format(x, y, bias)) {
        const size_t n = (size_t)src.len / kind_size(kind);
        const size_t codes = codes_bytes(n, 1 + x + y, target == TO_PACKED);
        if (check_length("out", dst.len, target == TO_VALUES ? (size_t)src.len : codes)) {
            nonfinites bad;
            Py_BEGIN_ALLOW_THREADS;
            bad = stochastic_all(l, spec_of(x, y, bias, 0), kind, seed, first, target, saturate, NULL, src.buf, n,
                                 dst.buf);
            Py_END_ALLOW_THREADS;
            result = Py_BuildValue("nn", (Py_ssize_t)bad.count, (Py_ssize_t)bad.first);
        }
    }
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_stochastic_groups(PyObject *self, PyObject *args)
{
    int level, kind, x, y, bias;
    unsigned long long seed;
    groups g;
    Py_ssize_t length, inner, first;
    Py_buffer scales, src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiipnnnKy*y*w*", &level, &kind, &x, &y, &bias, &g.wide, &length, &inner, &first,
                          &seed, &scales, &src, &dst))
        return NULL;
    g.length = (size_t)length, g.inner = (size_t)inner, g.first = (size_t)first, g.scales = scales.buf;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind) && check_format(x, y, bias)) {
        const size_t n = (size_t)src.len / kind_size(kind);
        if (check_length("packed", dst.len, packed_bytes(n, 1 + x + y)) && check_scales(&g, scales.len, n)) {
            Py_BEGIN_ALLOW_THREADS;
            stochastic_all(l, spec_of(x, y, bias, 0), kind, seed, g.first, TO_PACKED, 1, &g, src.buf, n, dst.buf);
            Py_END_ALLOW_THREADS;
            result = Py_BuildValue("");
        }
    }
    PyBuffer_Release(&scales);
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_exponents(PyObject *self, PyObject *args)
{
    int level, kind;
    Py_buffer src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiy*w*", &level, &kind, &src, &dst))
        return NULL;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind) && check_length("out", dst.len, (EXPONENTS + 2) * sizeof(int64_t))) {
        Py_BEGIN_ALLOW_THREADS;
        exponents_all(l, kind, src.buf, (size_t)src.len / kind_size(kind), dst.buf);
        Py_END_ALLOW_THREADS;
        result = Py_BuildValue("");
    }
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_compare(PyObject *self, PyObject *args)
{
    int level, kind;
    Py_buffer x, y;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiy*y*", &level, &kind, &x, &y))
        return NULL;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind) && check_length("y", y.len, (size_t)x.len)) {
        double totals[4];
        Py_BEGIN_ALLOW_THREADS;
        compare_all(l, kind, x.buf, y.buf, (size_t)x.len / kind_size(kind), totals);
        Py_END_ALLOW_THREADS;
        result = Py_BuildValue("dddd", totals[0], totals[1], totals[2], totals[3]);
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&y);
    return result;
}

static PyObject *py_measure(PyObject *self, PyObject *args)
{
    int level, kind, x, y, bias;
    groups g = {0, 0, 0, 0, NULL};
    Py_ssize_t length, inner;
    double limit;
    Py_buffer scales, packed, src;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiipnndz*y*y*", &level, &kind, &x, &y, &bias, &g.wide, &length, &inner, &limit,
                          &scales, &packed, &src))
        return NULL;
    g.length = (size_t)length, g.inner = (size_t)inner, g.scales = scales.buf;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind) && check_format(x, y, bias)) {
        const size_t n = (size_t)src.len / kind_size(kind);
        const groups *grouped = scales.buf == NULL ? NULL : &g;
        if (check_length("packed", packed.len, packed_bytes(n, 1 + x + y)) &&
            (grouped == NULL || check_scales(&g, scales.len, n))) {
            double totals[4];
            size_t above;
            Py_BEGIN_ALLOW_THREADS;
            above = measure_all(l, spec_of(x, y, bias, 0), kind, grouped, limit, packed.buf, src.buf, n, totals);
            Py_END_ALLOW_THREADS;
            result = Py_BuildValue("ddddn", totals[0], totals[1], totals[2], totals[3], (Py_ssize_t)above);
        }
    }
    PyBuffer_Release(&scales);
    PyBuffer_Release(&packed);
    PyBuffer_Release(&src);
    return result;
}

#define ARRAY_METHODS                                                                                        \
    {"stochastic", py_stochastic, METH_VARARGS,                                                              \
     "stochastic(level, kind, x, y, bias, seed, first, target, saturate, src, out) -> (count, first) of "    \
     "non-finite values; target 0 codes, 1 packed, 2 values."},                                              \
    {"stochastic_groups", py_stochastic_groups, METH_VARARGS,                                                \
     "stochastic_groups(level, kind, x, y, bias, wide, length, inner, first, seed, scales, src, out)."},     \
    {"exponents", py_exponents, METH_VARARGS,                                                                \
     "exponents(level, kind, src, out): adds to int64 counts of -1074 ... 1023, zeros, not finite."},        \
    {"compare", py_compare, METH_VARARGS,                                                                    \
     "compare(level, kind, x, y) -> (signal, noise, largest error, largest relative error)."},               \
    {"measure", py_measure, METH_VARARGS,                                                                    \
     "measure(level, kind, x, y, bias, wide, length, inner, limit, scales or None, packed, src) -> the errors as " \
     "compare, and the number of magnitudes above the limit."}
