/* The step codec for Python; included by _kernels.c after its checks. */

#if MANY_LEVELS
#define STEP_FUNCTION(level, name) (step_is_fast(level) ? avx2_step_##name : baseline_step_##name)
#else
#define STEP_FUNCTION(level, name) baseline_step_##name
#endif

static int check_step(int width, step_layout l)
{
    if ((width == 1 || width == 2 || width == 4) && l.bits >= 2 && l.bits <= 8 * width && l.mantissa_bits >= 0 &&
        l.bits - 1 - l.mantissa_bits >= 0 && l.bits - 1 - l.mantissa_bits <= 8)
        return 1;
    PyErr_Format(PyExc_ValueError, "invalid step of %d bits, %d of them mantissa, in %d bytes", l.bits,
                 l.mantissa_bits, width);
    return 0;
}

static PyObject *py_step_encode(PyObject *self, PyObject *args)
{
    int level, width;
    step_layout l;
    Py_buffer old, new, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiy*y*w*", &level, &width, &l.bits, &l.mantissa_bits, &old, &new, &dst))
        return NULL;
    if (lanes_of(level) != NULL && check_step(width, l) && check_length("old", old.len, (size_t)new.len) &&
        check_length("out", dst.len, (size_t)new.len + 1)) {
        const size_t n = (size_t)new.len / (size_t)width;
        step_memory memory = {.count = 0};
        size_t size;
        Py_BEGIN_ALLOW_THREADS;
        size = width == 1   ? STEP_FUNCTION(level, 8_encode_step)(l, old.buf, new.buf, n, dst.buf, &memory)
               : width == 2 ? STEP_FUNCTION(level, 16_encode_step)(l, old.buf, new.buf, n, dst.buf, &memory)
                            : STEP_FUNCTION(level, 32_encode_step)(l, old.buf, new.buf, n, dst.buf, &memory);
        step_release(&memory);
        Py_END_ALLOW_THREADS;
        result = PyLong_FromSize_t(size);
    }
    PyBuffer_Release(&old);
    PyBuffer_Release(&new);
    PyBuffer_Release(&dst);
    return result;
}

static PyObject *py_step_decode(PyObject *self, PyObject *args)
{
    int level, width;
    step_layout l;
    Py_buffer old, src, dst;
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiy*y*w*", &level, &width, &l.bits, &l.mantissa_bits, &old, &src, &dst))
        return NULL;
    if (lanes_of(level) != NULL && check_step(width, l) && check_length("old", old.len, (size_t)dst.len)) {
        const size_t n = (size_t)dst.len / (size_t)width, size = (size_t)src.len;
        step_memory memory = {.count = 0};
        int valid;
        Py_BEGIN_ALLOW_THREADS;
        valid = width == 1   ? STEP_FUNCTION(level, 8_decode_step)(l, old.buf, dst.buf, n, src.buf, size, &memory)
                : width == 2 ? STEP_FUNCTION(level, 16_decode_step)(l, old.buf, dst.buf, n, src.buf, size, &memory)
                             : STEP_FUNCTION(level, 32_decode_step)(l, old.buf, dst.buf, n, src.buf, size, &memory);
        step_release(&memory);
        Py_END_ALLOW_THREADS;
        result = memory.failed ? PyErr_NoMemory() : PyBool_FromLong(valid);
    }
    PyBuffer_Release(&old);
    PyBuffer_Release(&src);
    PyBuffer_Release(&dst);
    return result;
}

#define STEP_METHODS                                                                                                  \
    {"step_encode", py_step_encode, METH_VARARGS, "step_encode(level, width, bits, mantissa, old, new, out) -> size."}, \
    {"step_decode", py_step_decode, METH_VARARGS,                                                                     \
     "step_decode(level, width, bits, mantissa, old, data, out) -> whether the data are valid."}
