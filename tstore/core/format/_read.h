/* Reading short files: one call opens, reads and closes all of them, where Python takes a dozen calls for each. */

#ifndef _WIN32
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHORT_FILE 65536
#define MOST_BYTES (4 << 20) /* of all files, about */
#define ABSENT -1
#define UNREAD -2

/* Return the number of bytes read, ABSENT if there is no file, or UNREAD if the file is empty, not short or not
 * regular, or can't be read. Nothing can be read from most other files; fstat would cost as much as the read. */
static Py_ssize_t read_short(const char *path, char *buffer)
{
    Py_ssize_t count;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return errno == ENOENT ? ABSENT : UNREAD;
    count = read(fd, buffer, SHORT_FILE);
    close(fd);
    return 0 < count && count < SHORT_FILE ? count : UNREAD;
}

/* Read the file of a key into the buffer if it is not NULL, else only see whether the file is absent; return what
 * read_short does, or -3 with an exception. */
static Py_ssize_t read_key(PyObject *path_of, PyObject *root, PyObject *key, char *buffer)
{
    Py_ssize_t size = -3;
    struct stat status;
    PyObject *path = PyObject_CallFunctionObjArgs(path_of, root, key, NULL), *encoded = NULL;
    if (path != NULL && PyUnicode_FSConverter(path, &encoded)) {
        const char *name = PyBytes_AsString(encoded);
        Py_BEGIN_ALLOW_THREADS
        if (buffer != NULL)
            size = read_short(name, buffer);
        else
            size = stat(name, &status) != 0 && errno == ENOENT ? ABSENT : UNREAD;
        Py_END_ALLOW_THREADS
        Py_DECREF(encoded);
    }
    Py_XDECREF(path);
    return size;
}

static PyObject *py_read_leading(PyObject *self, PyObject *args)
{
    PyObject *path_of, *root, *keys, *unless = NULL, *key, *files = PyList_New(0), *rest = PyList_New(0), *result = NULL;
    char *buffer = PyMem_Malloc(SHORT_FILE);
    Py_ssize_t size = 0, total = 0;
    (void)self;
    if (files == NULL || rest == NULL || !PyArg_ParseTuple(args, "OOO|U", &path_of, &root, &keys, &unless))
        goto done;
    if (!PyIter_Check(keys)) {
        PyErr_SetString(PyExc_TypeError, "the keys must be an iterator");
        goto done;
    }
    if (buffer == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    while (size >= 0 && total < MOST_BYTES && (key = PyIter_Next(keys)) != NULL) {
        size = read_key(path_of, root, key, buffer);
        if (size >= 0) {
            PyObject *data = PyBytes_FromStringAndSize(buffer, size);
            size = data != NULL && PyList_Append(files, data) == 0 ? size : -3;
            Py_XDECREF(data);
            total += size;
        } else if (size != -3 && PyList_Append(rest, key) != 0) {
            size = -3;
        }
        Py_DECREF(key);
    }
    if (size == ABSENT && (key = PyIter_Next(keys)) != NULL) {
        size = read_key(path_of, root, key, NULL);
        if (size != -3 && PyList_Append(rest, key) != 0)
            size = -3;
        Py_DECREF(key);
    }
    if (size == ABSENT && unless != NULL && PyUnicode_GetLength(unless) > 0)
        size = read_key(path_of, root, unless, NULL);
    if (!PyErr_Occurred())
        result = Py_BuildValue("(OO)", files, size == ABSENT ? Py_None : rest);
done:
    PyMem_Free(buffer);
    Py_XDECREF(files);
    Py_XDECREF(rest);
    return result;
}
#endif
