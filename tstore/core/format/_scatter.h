/* Copies of chunks to strided arrays, whole or in part, with their checksums; included by kernels.c after _gather.h.
 *
 * A chunk is hashed first, so that it is in the CPU's caches when it is copied.
 */

/* Copy `part` elements along each axis of a chunk to an array, whose strides are `strides`. */
static void scatter_part(int ndim, const Py_ssize_t *part, const Py_ssize_t *chunk_strides, const Py_ssize_t *strides,
                         Py_ssize_t itemsize, char *to, const char *from)
{
    axis axes[MAX_AXES + 1];
    Py_ssize_t at[MAX_AXES + 1] = {0}, read = 0, write = 0;
    const int n = fewest_axes(ndim, part, chunk_strides, strides, itemsize, axes);
    do {
        copy_rows(to + write, from + read, axes[1].count, &axes[1], &axes[0], itemsize);
    } while (next_plane(axes, n, at, &read, &write));
}

/* Set the strides of a contiguous chunk; return its size in bytes, or 0 if that is too large. */
static Py_ssize_t contiguous_strides(int ndim, const Py_ssize_t *chunk, Py_ssize_t itemsize, Py_ssize_t *strides)
{
    Py_ssize_t size = itemsize;
    for (int i = ndim - 1; i >= 0; size *= chunk[i--]) {
        strides[i] = size;
        if (chunk[i] > PY_SSIZE_T_MAX / size)
            return 0;
    }
    return size;
}

static void scatter_all(const Py_buffer *target, int first, const char *from, Py_ssize_t chunk_size, Py_ssize_t count,
                        Py_ssize_t block, XXH128_canonical_t *checks)
{
    Py_ssize_t at[MAX_AXES] = {0}, strides[MAX_AXES];
    const int ndim = target->ndim - first;
    contiguous_strides(ndim, target->shape + first, target->itemsize, strides);
    for (; count > 0; count--, from += chunk_size) {
        char *to = target->buf;
        for (int i = 0; i < first; i++)
            to += at[i] * target->strides[i];
        checks = hash_chunk(from, chunk_size, block, checks);
        scatter_part(ndim, target->shape + first, strides, target->strides + first, target->itemsize, to, from);
        for (int i = first - 1; i >= 0 && ++at[i] == target->shape[i]; i--)
            at[i] = 0;
    }
}

static PyObject *py_scatter(PyObject *self, PyObject *args)
{
    Py_buffer data, target;
    PyObject *values, *checks = NULL;
    Py_ssize_t block;
    int first;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*Oin", &data, &values, &first, &block))
        return NULL;
    if (PyObject_GetBuffer(values, &target, PyBUF_STRIDES | PyBUF_WRITABLE) != 0) {
        PyBuffer_Release(&data);
        return NULL;
    }
    if (block < 1 || first < 0 || first > target.ndim || target.ndim > MAX_AXES || data.len < 1 ||
        data.len != target.len) {
        PyErr_Format(PyExc_ValueError, "%zd bytes in chunks behind %d axes and in blocks of %zd bytes do not fill %zd "
                     "bytes of %d axes", data.len, first, block, target.len, target.ndim);
    } else {
        Py_ssize_t count = 1;
        for (int i = 0; i < first; i++)
            count *= target.shape[i];
        const Py_ssize_t size = data.len / count;
        checks = PyBytes_FromStringAndSize(NULL, count * count_of(size, block) * (Py_ssize_t)sizeof(XXH128_canonical_t));
        if (checks != NULL) {
            XXH128_canonical_t *out = (XXH128_canonical_t *)PyBytes_AsString(checks);
            PyThreadState *unlocked = data.len < UNLOCKED_SIZE ? NULL : PyEval_SaveThread();
            scatter_all(&target, first, data.buf, size, count, block, out);
            if (unlocked != NULL)
                PyEval_RestoreThread(unlocked);
        }
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&data);
    return checks;
}

/* A region of a box of chunks: the region begins at `start` in the first chunk. */
typedef struct {
    Py_ssize_t chunk[MAX_AXES], start[MAX_AXES], counts[MAX_AXES], strides[MAX_AXES];
    Py_ssize_t chunk_size, chunk_count;
} region;

/* Fill in a region of the shape of the target; return 0 with an exception unless its chunks have `size` bytes. */
static int measure_region(region *r, const Py_buffer *target, PyObject *chunk, PyObject *start, Py_ssize_t size)
{
    const int ndim = target->ndim;
    int valid = ndim <= MAX_AXES && target->itemsize > 0 && PyTuple_Size(chunk) == ndim && PyTuple_Size(start) == ndim;
    for (int i = 0; valid && i < ndim; i++) {
        r->chunk[i] = PyLong_AsSsize_t(PyTuple_GetItem(chunk, i));
        r->start[i] = PyLong_AsSsize_t(PyTuple_GetItem(start, i));
        valid = r->start[i] >= 0 && r->start[i] < r->chunk[i] && target->shape[i] > 0 &&
                target->shape[i] <= PY_SSIZE_T_MAX - r->chunk[i];
    }
    r->chunk_size = valid ? contiguous_strides(ndim, r->chunk, target->itemsize, r->strides) : 0;
    r->chunk_count = 1;
    Py_ssize_t left = r->chunk_size ? size / r->chunk_size : 0;
    for (int i = 0; left && i < ndim; i++) {
        r->counts[i] = (r->start[i] + target->shape[i] - 1) / r->chunk[i] + 1;
        left /= r->counts[i];
        r->chunk_count = left ? r->chunk_count * r->counts[i] : 1;
    }
    if (!left || r->chunk_count * r->chunk_size != size) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "%zd bytes are not the chunks of a region of %d axes", size, ndim);
        return 0;
    }
    return 1;
}

static void scatter_region(const region *r, const Py_buffer *target, const char *data, Py_ssize_t block,
                           XXH128_canonical_t *checks)
{
    Py_ssize_t at[MAX_AXES] = {0}, part[MAX_AXES];
    for (Py_ssize_t number = 0; number < r->chunk_count; number++, data += r->chunk_size) {
        const char *from = data;
        char *to = target->buf;
        for (int i = 0; i < target->ndim; i++) {
            const Py_ssize_t begin = at[i] * r->chunk[i], end = r->start[i] + target->shape[i];
            const Py_ssize_t low = begin > r->start[i] ? begin : r->start[i];
            part[i] = smaller(begin + r->chunk[i], end) - low;
            from += (low - begin) * r->strides[i];
            to += (low - r->start[i]) * target->strides[i];
        }
        checks = hash_chunk(data, r->chunk_size, block, checks);
        scatter_part(target->ndim, part, r->strides, target->strides, target->itemsize, to, from);
        for (int i = target->ndim - 1; i >= 0 && ++at[i] == r->counts[i]; i--)
            at[i] = 0;
    }
}

static PyObject *py_scatter_region(PyObject *self, PyObject *args)
{
    Py_buffer data, target;
    PyObject *values, *chunk, *start, *checks = NULL;
    Py_ssize_t block;
    region r;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*OO!O!n", &data, &values, &PyTuple_Type, &chunk, &PyTuple_Type, &start, &block))
        return NULL;
    if (PyObject_GetBuffer(values, &target, PyBUF_STRIDES | PyBUF_WRITABLE) != 0) {
        PyBuffer_Release(&data);
        return NULL;
    }
    if (block < 1) {
        PyErr_Format(PyExc_ValueError, "blocks of %zd bytes; expected at least 1", block);
    } else if (measure_region(&r, &target, chunk, start, data.len)) {
        const Py_ssize_t size = r.chunk_count * count_of(r.chunk_size, block) * (Py_ssize_t)sizeof(XXH128_canonical_t);
        checks = PyBytes_FromStringAndSize(NULL, size);
        if (checks != NULL) {
            XXH128_canonical_t *out = (XXH128_canonical_t *)PyBytes_AsString(checks);
            PyThreadState *unlocked = data.len < UNLOCKED_SIZE ? NULL : PyEval_SaveThread();
            scatter_region(&r, &target, data.buf, block, out);
            if (unlocked != NULL)
                PyEval_RestoreThread(unlocked);
        }
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&data);
    return checks;
}
