/* tstore.core.format.kernels: work on many blocks, chunks or files in one call.
 *
 * The xxhash package hashes one block a call and takes the lock after each, which slows a training loop in another
 * thread. The hash itself is the official implementation (codecs/xxhash), so the results are equal. For the same
 * reason one call copies many chunks, and hashes the copies (_gather.h, _scatter.h).
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__x86_64__) || defined(_M_X64)
#include "xxh_x86dispatch.c"
#define XXH3_HASH XXH3_128bits_dispatch
#else
#define XXH_INLINE_ALL
#include "xxhash.h"
#define XXH3_HASH XXH3_128bits
#endif

#define UNLOCKED_SIZE 32768 /* bytes from which on hashing takes longer than releasing the lock */

static Py_ssize_t count_of(Py_ssize_t length, Py_ssize_t part)
{
    return length ? (length - 1) / part + 1 : 1;
}

static Py_ssize_t smaller(Py_ssize_t a, Py_ssize_t b)
{
    return a < b ? a : b;
}

/* Write the checksum of each block, at least one, to `out`; return the position after the last. */
static XXH128_canonical_t *hash_chunk(const char *start, Py_ssize_t rest, Py_ssize_t block, XXH128_canonical_t *out)
{
    do {
        Py_ssize_t length = smaller(rest, block);
        XXH128_canonicalFromHash(out++, XXH3_HASH(start, (size_t)length));
        start += length;
        rest -= length;
    } while (rest > 0);
    return out;
}

static void hash_blocks(const Py_buffer *data, Py_ssize_t chunk, Py_ssize_t block, XXH128_canonical_t *out)
{
    const char *start = data->buf;
    Py_ssize_t rest = data->len;
    do {
        Py_ssize_t length = smaller(rest, chunk);
        out = hash_chunk(start, length, block, out);
        start += length;
        rest -= length;
    } while (rest > 0);
}

static PyObject *py_block_checks(PyObject *self, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t chunk, block;
    PyObject *checks = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*nn", &data, &chunk, &block))
        return NULL;
    if (chunk < 1 || block < 1) {
        PyErr_Format(PyExc_ValueError, "chunks of %zd and blocks of %zd bytes; expected at least 1", chunk, block);
    } else {
        Py_ssize_t chunks = count_of(data.len, chunk), last = data.len - (chunks - 1) * chunk;
        Py_ssize_t count = (chunks - 1) * count_of(chunk, block) + count_of(last, block);
        checks = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(XXH128_canonical_t));
    }
    if (checks != NULL) {
        XXH128_canonical_t *out = (XXH128_canonical_t *)PyBytes_AsString(checks);
        if (data.len < UNLOCKED_SIZE) {
            hash_blocks(&data, chunk, block, out);
        } else {
            Py_BEGIN_ALLOW_THREADS
            hash_blocks(&data, chunk, block, out);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&data);
    return checks;
}

#include "_gather.h"
#include "_read.h"
#include "_scatter.h"

static PyMethodDef methods[] = {
    {"block_checks", py_block_checks, METH_VARARGS,
     "block_checks(data, chunk, block) -> the joined xxh3-128 of each `block` bytes of each `chunk` bytes of data."},
    {"gather", py_gather, METH_VARARGS,
     "gather(sources, target, block) -> for each source (an array or a list of them, chunk shape, fill value, offset\n"
     "in target), whose chunks are copied to target, in C order and padded at the edges, the joined xxh3-128 of each\n"
     "`block` bytes of each chunk."},
    {"scatter", py_scatter, METH_VARARGS,
     "scatter(data, target, first, block) -> the joined xxh3-128 of each `block` bytes of each chunk of data, which are\n"
     "copied to target, an array whose axes are `first` axes of chunks and then those of a chunk."},
#ifndef _WIN32
    {"read_leading", py_read_leading, METH_VARARGS,
     "read_leading(path_of, root, keys, unless=\"\") -> the contents of the files at path_of(root, key) for the first keys of\n"
     "an iterator, and None if neither the next file, the one after it, nor that of the key `unless` exists.\n"
     "Otherwise, the keys drawn from the iterator after these: that of a file that is missing, long, not regular or\n"
     "can't be read, and perhaps of the next."},
#endif
    {"scatter_region", py_scatter_region, METH_VARARGS,
     "scatter_region(data, target, chunk, start, block) -> the joined xxh3-128 of each `block` bytes of each chunk of\n"
     "data. They have the shape `chunk`, and are a box; its region that begins at `start` is copied to target."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tstore.core.format.kernels", "Checksums and copies of many chunks.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_kernels(void)
{
    return PyModuleDef_Init(&definition);
}
