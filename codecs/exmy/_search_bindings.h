/* The functions of _search.h for Python; included by _kernels.c. */

/* Returns the number of runs of `length` elements in src; 0, with an exception set, if the size of src is not a
 * multiple of the size of a run. */
static size_t runs_of(int kind, Py_ssize_t length, Py_ssize_t bytes)
{
    const size_t run = length > 0 && length <= PY_SSIZE_T_MAX / 8 ? (size_t)length * kind_size(kind) : 0;
    if (run > 0 && bytes > 0 && (size_t)bytes % run == 0)
        return (size_t)bytes / run;
    PyErr_SetString(PyExc_ValueError, "the size of src is not a multiple of that of the runs");
    return 0;
}

static int check_factors(Py_ssize_t count)
{
    if (count >= 1 && count <= MOST_FACTORS)
        return 1;
    PyErr_Format(PyExc_ValueError, "expected 1 to %d factors or biases, not %zd", MOST_FACTORS, count);
    return 0;
}

static PyObject *py_squared_errors(PyObject *self, PyObject *args)
{
    int level, kind, x, y, bias, wide;
    Py_buffer src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiipy*w*", &level, &kind, &x, &y, &bias, &wide, &src, &dst))
        return NULL;
    const lanes *l = lanes_of(level);
    const Py_ssize_t biases = dst.len / (Py_ssize_t)sizeof(double);
    if (l != NULL && check_kind(kind) && check_factors(biases) && check_format(x, y, bias) &&
        check_format(x, y, bias + (int)biases - 1)) {
        spec specs[MOST_FACTORS];
        for (int k = 0; k < biases; k++)
            specs[k] = spec_of(x, y, bias + k, 0);
        Py_BEGIN_ALLOW_THREADS;
        squared_errors_all(l, specs, (size_t)biases, kind, wide, src.buf, (size_t)src.len / kind_size(kind), dst.buf);
        Py_END_ALLOW_THREADS;
        result = Py_BuildValue("");
    }
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_energy(PyObject *self, PyObject *args)
{
    int level, kind;
    Py_buffer src;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiy*", &level, &kind, &src))
        return NULL;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind)) {
        double energy;
        Py_BEGIN_ALLOW_THREADS;
        energy = energy_all(l, kind, src.buf, (size_t)src.len / kind_size(kind));
        Py_END_ALLOW_THREADS;
        result = PyFloat_FromDouble(energy);
    }
    PyBuffer_Release(&src);
    return result;
}

static PyObject *py_peaks(PyObject *self, PyObject *args)
{
    int level, kind;
    Py_ssize_t length;
    Py_buffer src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiny*w*", &level, &kind, &length, &src, &dst))
        return NULL;
    const lanes *l = lanes_of(level);
    if (l != NULL && check_kind(kind)) {
        const size_t runs = runs_of(kind, length, src.len);
        if (runs > 0 && check_length("out", dst.len, runs * sizeof(double))) {
            Py_BEGIN_ALLOW_THREADS;
            peaks_all(l, kind, (size_t)length, src.buf, runs, dst.buf);
            Py_END_ALLOW_THREADS;
            result = Py_BuildValue("");
        }
    }
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_noise(PyObject *self, PyObject *args)
{
    int level, kind, x, y, bias, wide;
    Py_ssize_t length;
    Py_buffer scales, factors, src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiipny*y*y*w*", &level, &kind, &x, &y, &bias, &wide, &length, &scales, &factors,
                          &src, &dst))
        return NULL;
    const lanes *l = lanes_of(level);
    const size_t count = (size_t)factors.len / sizeof(double);
    if (l != NULL && check_kind(kind) && check_format(x, y, bias) && check_factors((Py_ssize_t)count)) {
        const size_t runs = runs_of(kind, length, src.len);
        if (runs > 0 && check_length("scales", scales.len, runs * (wide ? 8 : 4)) &&
            check_length("out", dst.len, runs * count * sizeof(double))) {
            Py_BEGIN_ALLOW_THREADS;
            noise_all(l, spec_of(x, y, bias, 0), kind, wide, (size_t)length, scales.buf, factors.buf, count,
                      src.buf, runs, dst.buf);
            Py_END_ALLOW_THREADS;
            result = Py_BuildValue("");
        }
    }
    PyBuffer_Release(&scales);
    PyBuffer_Release(&factors);
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_least(PyObject *self, PyObject *args)
{
    int level, kind, x, y, bias, wide, rising;
    Py_ssize_t length;
    Py_buffer scales, factors, tries, src, best, least;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiippny*y*y*y*w*w*", &level, &kind, &x, &y, &bias, &wide, &rising, &length, &scales,
                          &factors, &tries, &src, &best, &least))
        return NULL;
    const lanes *l = lanes_of(level);
    const size_t count = (size_t)factors.len / sizeof(double);
    if (l != NULL && check_kind(kind) && check_format(x, y, bias) && check_factors((Py_ssize_t)count)) {
        const size_t runs = runs_of(kind, length, src.len);
        if (runs > 0 && check_length("scales", scales.len, runs * (wide ? 8 : 4)) &&
            check_length("tries", tries.len, runs * sizeof(int64_t)) &&
            check_length("best", best.len, runs * sizeof(int64_t)) &&
            check_length("least", least.len, runs * sizeof(double))) {
            const volatile integer64 *each = tries.buf;
            size_t i = 0;
            while (i < runs && each[i] >= 1 && (size_t)each[i] <= count)
                i++;
            if (i == runs) {
                Py_BEGIN_ALLOW_THREADS;
                least_all(l, spec_of(x, y, bias, 0), kind, wide, rising, (size_t)length, scales.buf, factors.buf,
                          (int64_t)count, each, src.buf, runs, best.buf, least.buf);
                Py_END_ALLOW_THREADS;
                result = Py_BuildValue("");
            } else
                PyErr_SetString(PyExc_ValueError, "tries must be 1 to the number of factors");
        }
    }
    PyBuffer_Release(&scales);
    PyBuffer_Release(&factors);
    PyBuffer_Release(&tries);
    PyBuffer_Release(&src);
    PyBuffer_Release(&best);
    PyBuffer_Release(&least);
    return result;
}

static PyObject *py_columns(PyObject *self, PyObject *args)
{
    int itemsize;
    Py_ssize_t rows, stride, first, width;
    Py_buffer src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "innnny*w*", &itemsize, &rows, &stride, &first, &width, &src, &dst))
        return NULL;
    if (itemsize == 2 || itemsize == 4 || itemsize == 8) {
        const size_t size = (size_t)itemsize, cells = (size_t)src.len / size;
        if (rows > 0 && first >= 0 && width > 0 && width <= stride && first <= stride - width &&
            (size_t)stride <= cells && (size_t)rows == cells / (size_t)stride &&
            check_length("out", dst.len, (size_t)rows * (size_t)width * size)) {
            const uint8_t *from = (const uint8_t *)src.buf + (size_t)first * size;
            Py_BEGIN_ALLOW_THREADS;
            if (size == 2)
                columns16((const code16 *)from, (size_t)stride, (size_t)rows, (size_t)width, dst.buf);
            else if (size == 4)
                columns32((const float32_bits *)from, (size_t)stride, (size_t)rows, (size_t)width, dst.buf);
            else
                columns64((const float64_bits *)from, (size_t)stride, (size_t)rows, (size_t)width, dst.buf);
            Py_END_ALLOW_THREADS;
            result = Py_BuildValue("");
        }
    }
    if (result == NULL && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the columns are out of range of src");
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

#define SEARCH_METHODS                                                                                       \
    {"squared_errors", py_squared_errors, METH_VARARGS,                                                      \
     "squared_errors(level, kind, x, y, bias, wide, src, out): float64 for each of the biases from bias on."},\
    {"energy", py_energy, METH_VARARGS, "energy(level, kind, src) -> the sum of squares."},                  \
    {"peaks", py_peaks, METH_VARARGS, "peaks(level, kind, length, src, out): one float64 for each run."},    \
    {"noise", py_noise, METH_VARARGS,                                                                        \
     "noise(level, kind, x, y, bias, wide, length, scales, factors, src, out): float64 by run and factor."}, \
    {"least", py_least, METH_VARARGS,                                                                        \
     "least(level, kind, x, y, bias, wide, rising, length, scales, factors, tries, src, best, least)."},    \
    {"columns", py_columns, METH_VARARGS, "columns(itemsize, rows, stride, first, width, src, out)."}
