/* Copies of chunks from strided arrays, with their checksums; included by kernels.c.
 *
 * The bytes of a gathered chunk are written in order, and each block is hashed as soon as it is complete, while it is
 * in the CPU's caches.
 */

#define MAX_AXES 64

typedef struct {
    Py_ssize_t count, from, to; /* `from` and `to` are strides, in the values and in the chunk */
} axis;

/* Arrays of one shape to divide into chunks, which follow each other at `target`. */
typedef struct {
    Py_buffer *arrays;
    Py_ssize_t array_count;
    Py_buffer fill; /* the element that pads chunks beyond the edge of an array */
    Py_ssize_t chunk[MAX_AXES], strides[MAX_AXES], counts[MAX_AXES];
    Py_ssize_t chunk_size, chunk_count; /* in bytes; of one array */
    char *target;
} source;

static void copy_elements(char *to, Py_ssize_t to_stride, const char *from, Py_ssize_t from_stride, Py_ssize_t count,
                          Py_ssize_t size)
{
    if (to_stride == size && from_stride == size) {
        memcpy(to, from, (size_t)(count * size));
        return;
    }
/* a memcpy of constant size is a load and a store that need no alignment */
#define COPY_ELEMENTS(bytes)                                                                                         \
    for (; count > 0; count--, to += to_stride, from += from_stride)                                                \
    memcpy(to, from, bytes)
    switch (size) {
    case 1: COPY_ELEMENTS(1); break;
    case 2: COPY_ELEMENTS(2); break;
    case 4: COPY_ELEMENTS(4); break;
    case 8: COPY_ELEMENTS(8); break;
    case 16: COPY_ELEMENTS(16); break;
    default: COPY_ELEMENTS((size_t)size);
    }
#undef COPY_ELEMENTS
}

/* Copy rows of elements; the loop is short, so that the processor loads several rows from memory at once. */
static void copy_rows(char *to, const char *from, Py_ssize_t rows, const axis *row, const axis *element,
                      Py_ssize_t size)
{
    const Py_ssize_t length = element->count * size;
    if (element->to == size && element->from == size) {
        for (; rows > 0; rows--, to += row->to, from += row->from)
            memcpy(to, from, (size_t)length);
    } else {
        for (; rows > 0; rows--, to += row->to, from += row->from)
            copy_elements(to, element->to, from, element->from, element->count, size);
    }
}

/* Go to the next of the planes, which the axes from the third on count; return 0 after the last. */
static int next_plane(const axis *axes, int n, Py_ssize_t *at, Py_ssize_t *from, Py_ssize_t *to)
{
    for (int k = 2; k < n; k++) {
        *from += axes[k].from, *to += axes[k].to;
        if (++at[k] < axes[k].count)
            return 1;
        *from -= axes[k].from * axes[k].count, *to -= axes[k].to * axes[k].count;
        at[k] = 0;
    }
    return 0;
}

/* Describe the copy of a part of a chunk, `part` elements along each axis, by as few axes as possible, the innermost
 * first; return the number of axes, at least two: those of elements and of rows. */
static int fewest_axes(int ndim, const Py_ssize_t *part, const Py_ssize_t *from, const Py_ssize_t *to,
                       Py_ssize_t itemsize, axis *axes)
{
    int n = 0;
    for (int i = ndim - 1; i >= 0; i--) {
        axis *inner = n ? &axes[n - 1] : NULL;
        if (part[i] == 1)
            continue;
        if (inner && inner->from * inner->count == from[i] && inner->to * inner->count == to[i])
            inner->count *= part[i];
        else
            axes[n++] = (axis){part[i], from[i], to[i]};
    }
    for (; n < 2; n++)
        axes[n] = (axis){1, itemsize, itemsize};
    return n;
}

static XXH128_canonical_t *gather_chunk(const source *s, const Py_buffer *values, const char *from,
                                        const Py_ssize_t *part, char *to, Py_ssize_t block,
                                        XXH128_canonical_t *checks)
{
    axis axes[MAX_AXES + 1];
    Py_ssize_t at[MAX_AXES + 1] = {0}, read = 0, write = 0, hashed = 0;
    const int n = fewest_axes(values->ndim, part, values->strides, s->strides, values->itemsize, axes);
    const axis element = axes[0], row = axes[1];
    /* copy at most about a block at a time: several rows, or a part of one */
    const Py_ssize_t rows = row.to < block ? block / row.to : 1;
    const Py_ssize_t elements = element.to < block ? block / element.to : 1;
    do {
        for (Py_ssize_t j = 0; j < row.count; j += rows) {
            const Py_ssize_t row_count = smaller(rows, row.count - j);
            for (Py_ssize_t i = 0; i < element.count; i += elements) {
                const axis copied = {smaller(elements, element.count - i), element.from, element.to};
                const Py_ssize_t start = write + j * row.to + i * element.to;
                copy_rows(to + start, from + read + j * row.from + i * element.from, row_count, &row, &copied,
                          values->itemsize);
                const Py_ssize_t complete = start + (row_count - 1) * row.to + copied.count * element.to;
                for (; complete - hashed >= block; hashed += block)
                    checks = hash_chunk(to + hashed, block, block, checks);
            }
        }
    } while (next_plane(axes, n, at, &read, &write));
    return hashed < s->chunk_size ? hash_chunk(to + hashed, s->chunk_size - hashed, block, checks) : checks;
}

/* Copy the chunks of one array to `to`; return the position after its last checksum. */
static XXH128_canonical_t *gather_array(const source *s, const Py_buffer *values, char *to, Py_ssize_t block,
                                        XXH128_canonical_t *checks)
{
    Py_ssize_t at[MAX_AXES] = {0}, part[MAX_AXES];
    for (Py_ssize_t number = 0; number < s->chunk_count; number++, to += s->chunk_size) {
        const char *from = values->buf;
        int whole = 1;
        for (int i = 0; i < values->ndim; i++) {
            const Py_ssize_t start = at[i] * s->chunk[i];
            from += start * values->strides[i];
            part[i] = smaller(s->chunk[i], values->shape[i] - start);
            whole &= part[i] == s->chunk[i];
        }
        if (!whole)
            copy_elements(to, s->fill.len, s->fill.buf, 0, s->chunk_size / s->fill.len, s->fill.len);
        checks = gather_chunk(s, values, from, part, to, block, checks);
        for (int i = values->ndim - 1; i >= 0 && ++at[i] == s->counts[i]; i--)
            at[i] = 0;
    }
    return checks;
}

static void gather_source(const source *s, Py_ssize_t block, XXH128_canonical_t *checks)
{
    const Py_ssize_t size = s->chunk_size * s->chunk_count;
    for (Py_ssize_t i = 0; i < s->array_count; i++)
        checks = gather_array(s, &s->arrays[i], s->target + i * size, block, checks);
}

/* Read the shape of the chunks; return 0 with an exception unless those of all arrays fit into `room` bytes. */
static int measure_source(source *s, PyObject *chunk, Py_ssize_t room)
{
    const Py_buffer *values = &s->arrays[0];
    const int ndim = values->ndim;
    Py_ssize_t size = values->itemsize;
    if (ndim > MAX_AXES || PyTuple_Size(chunk) != ndim || size < 1 || s->fill.len != size) {
        PyErr_Format(PyExc_ValueError, "chunks of %zd axes and a fill value of %zd bytes for values of %d axes and "
                     "%zd bytes", PyTuple_Size(chunk), s->fill.len, ndim, size);
        return 0;
    }
    s->chunk_count = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        const Py_ssize_t n = s->chunk[i] = PyLong_AsSsize_t(PyTuple_GetItem(chunk, i));
        if (n < 1) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "chunks of %zd elements; expected at least 1", n);
            return 0;
        }
        s->counts[i] = values->shape[i] ? (values->shape[i] - 1) / n + 1 : 0;
        s->chunk_count = s->counts[i] ? s->chunk_count : 0;
        s->strides[i] = size;
        if (size > PY_SSIZE_T_MAX / n) {
            PyErr_SetString(PyExc_OverflowError, "the chunks are too large");
            return 0;
        }
        size *= n;
    }
    s->chunk_size = size;
    Py_ssize_t left = room / size / s->array_count; /* chunks for which there is room in each array's part */
    for (int i = 0; s->chunk_count && i < ndim; i++) {
        left /= s->counts[i];
        s->chunk_count = left ? s->chunk_count * s->counts[i] : 1;
    }
    if (s->chunk_count && !left) {
        PyErr_Format(PyExc_ValueError, "the chunks do not fit into %zd bytes", room);
        return 0;
    }
    return 1;
}

static void release_source(source *s)
{
    while (s->array_count > 0)
        PyBuffer_Release(&s->arrays[--s->array_count]);
    PyMem_Free(s->arrays);
    PyBuffer_Release(&s->fill); /* which may never have been filled in */
}

/* Get the buffers of one array, or of a list of arrays with one shape and itemsize. */
static int get_arrays(source *s, PyObject *values)
{
    const int listed = PyList_Check(values);
    const Py_ssize_t count = listed ? PyList_Size(values) : 1;
    if (count == 0) {
        PyErr_SetString(PyExc_ValueError, "a source without arrays");
        return 0;
    }
    s->arrays = PyMem_Malloc((size_t)count * sizeof *s->arrays);
    if (s->arrays == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++, s->array_count++) {
        PyObject *array = listed ? PyList_GetItem(values, i) : values; /* NULL if the list has shrunk */
        if (array == NULL || PyObject_GetBuffer(array, &s->arrays[i], PyBUF_STRIDES) != 0)
            return 0;
        const Py_buffer *first = &s->arrays[0], *own = &s->arrays[i];
        int equal = own->ndim == first->ndim && own->itemsize == first->itemsize;
        for (int k = 0; equal && k < own->ndim; k++)
            equal = own->shape[k] == first->shape[k];
        if (!equal) {
            PyBuffer_Release(&s->arrays[i]);
            PyErr_SetString(PyExc_ValueError, "the arrays of a source differ in their shape or itemsize");
            return 0;
        }
    }
    return 1;
}

/* Fill in a source, which is all zeros, from its tuple; `release_source` must follow. */
static int begin_source(source *s, PyObject *item, const Py_buffer *target)
{
    PyObject *values, *chunk;
    Py_ssize_t offset;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "a source must be a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(item, "OO!y*n", &values, &PyTuple_Type, &chunk, &s->fill, &offset) ||
        !get_arrays(s, values))
        return 0;
    if (offset < 0 || offset > target->len) {
        PyErr_Format(PyExc_ValueError, "no offset %zd in %zd bytes", offset, target->len);
        return 0;
    }
    s->target = (char *)target->buf + offset;
    return measure_source(s, chunk, target->len - offset);
}

/* Gather all sources and return a list of their checksums. */
static PyObject *gather_all(const source *sources, Py_ssize_t count, Py_ssize_t block)
{
    PyObject *all = PyList_New(count);
    XXH128_canonical_t **checks = PyMem_Calloc((size_t)count + 1, sizeof *checks);
    Py_ssize_t size = 0;
    if (all != NULL && checks == NULL)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; all != NULL && checks != NULL && i < count; i++) {
        const source *s = &sources[i];
        const Py_ssize_t per_chunk = count_of(s->chunk_size, block) * (Py_ssize_t)sizeof **checks;
        PyObject *bytes = PyBytes_FromStringAndSize(NULL, s->array_count * s->chunk_count * per_chunk);
        if (bytes == NULL) {
            PyMem_Free(checks), checks = NULL;
        } else {
            checks[i] = (XXH128_canonical_t *)PyBytes_AsString(bytes);
            PyList_SetItem(all, i, bytes);
            size += s->chunk_size * s->chunk_count * s->array_count;
        }
    }
    if (all == NULL || checks == NULL) {
        PyMem_Free(checks);
        Py_XDECREF(all);
        return NULL;
    }
    PyThreadState *unlocked = size < UNLOCKED_SIZE ? NULL : PyEval_SaveThread();
    for (Py_ssize_t i = 0; i < count; i++)
        gather_source(&sources[i], block, checks[i]);
    if (unlocked != NULL)
        PyEval_RestoreThread(unlocked);
    PyMem_Free(checks);
    return all;
}

static PyObject *py_gather(PyObject *self, PyObject *args)
{
    PyObject *items, *all = NULL;
    Py_buffer target;
    Py_ssize_t block, begun = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!w*n", &PyList_Type, &items, &target, &block))
        return NULL;
    const Py_ssize_t count = PyList_Size(items);
    source *sources = PyMem_Calloc((size_t)count + 1, sizeof *sources);
    if (sources == NULL) {
        PyErr_NoMemory();
    } else if (block < 1) {
        PyErr_Format(PyExc_ValueError, "blocks of %zd bytes; expected at least 1", block);
    } else {
        int complete = 1;
        while (complete && begun < count) {
            PyObject *item = PyList_GetItem(items, begun); /* NULL if the list has shrunk */
            complete = item != NULL && begin_source(&sources[begun], item, &target);
            begun++;
        }
        if (complete)
            all = gather_all(sources, count, block);
    }
    while (begun > 0)
        release_source(&sources[--begun]);
    PyMem_Free(sources);
    PyBuffer_Release(&target);
    return all;
}
