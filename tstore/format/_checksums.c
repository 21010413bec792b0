/* tstore.format._checksums: the checksums of many blocks in one call, which releases the interpreter's lock once.
 *
 * The xxhash package hashes one block a call and takes the lock after each, which slows a training loop in another
 * thread. The hash itself is the official implementation (codecs/xxhash), so the results are equal.
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

static void hash_blocks(const Py_buffer *data, Py_ssize_t size, XXH128_canonical_t *out)
{
    const char *block = data->buf;
    Py_ssize_t rest = data->len;
    do {
        Py_ssize_t length = rest < size ? rest : size;
        XXH128_canonicalFromHash(out++, XXH3_HASH(block, (size_t)length));
        block += length;
        rest -= length;
    } while (rest > 0);
}

static PyObject *py_block_checks(PyObject *self, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t size;
    PyObject *checks = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*n", &data, &size))
        return NULL;
    if (size < 1) {
        PyErr_Format(PyExc_ValueError, "blocks of %zd bytes; expected at least 1", size);
    } else {
        Py_ssize_t count = data.len ? (data.len - 1) / size + 1 : 1;
        checks = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(XXH128_canonical_t));
    }
    if (checks != NULL) {
        XXH128_canonical_t *out = (XXH128_canonical_t *)PyBytes_AsString(checks);
        if (data.len < UNLOCKED_SIZE) {
            hash_blocks(&data, size, out);
        } else {
            Py_BEGIN_ALLOW_THREADS
            hash_blocks(&data, size, out);
            Py_END_ALLOW_THREADS
        }
    }
    PyBuffer_Release(&data);
    return checks;
}

static PyMethodDef methods[] = {
    {"block_checks", py_block_checks, METH_VARARGS,
     "block_checks(data, size) -> the joined xxh3-128 of each `size` bytes of `data`; empty data have one."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tstore.format._checksums", "Checksums of many blocks.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__checksums(void)
{
    return PyModuleDef_Init(&definition);
}
