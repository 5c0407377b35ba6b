/* Loops that are worth compiling. Now: those of the planes codec's paired layout (docs/format.md, section 9), one pass over a block.
 *
 * storage/codecs/pairing.py holds the same loops in numpy, which run where this module was not compiled; tests hold the two against each
 * other bit by bit. Numbers are little-endian, as in the format. Every function checks the lengths it is given and works without the GIL.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* One source, compiled for several generations of processors; the loader takes the best that this one has. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_PROCESSOR
#endif

/* Blocks begin at any byte. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));

enum { CHUNK = 512, NUM_CODES = 16, REST = 0x807F, SIGNS = 0x8080, MANTISSAS = 0x7F7F };

/* Sign and mantissa of the first float, and of the second with its bytes swapped, so that they share no bit. */
#define REST_OF(first, second) (((first) & REST) | (((second) & 0x7F) << 8) | (((second) >> 8) & 0x80))
#define SECOND_REST(rest) ((((rest) >> 8) & 0x7F) | (((rest) & 0x80) << 8))

typedef struct {
    int64_t *positions; /* of first floats from 0 on, of second floats from `room` on */
    uint8_t *exponents; /* likewise */
    Py_ssize_t room, num_first, num_second;
} outside_t;

/* Pairs from 32-bit floats. Returns the bits above the codes that any exponent has, and in *signs the bits of the rests. */
EACH_PROCESSOR
static unsigned pair_floats(const u32 *restrict first, const u32 *restrict second, Py_ssize_t count, unsigned base, u16 *restrict low_first,
                            u16 *restrict low_second, u16 *restrict rest, uint8_t *restrict codes, unsigned *restrict signs)
{
    unsigned high = 0, any = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t a = first[i], b = second[i];
        uint32_t code_a = ((a >> 23) - base) & 0xFF, code_b = ((b >> 23) - base) & 0xFF;
        uint32_t word = REST_OF(a >> 16, b >> 16);
        low_first[i] = (uint16_t)a;
        low_second[i] = (uint16_t)b;
        rest[i] = (uint16_t)word;
        codes[i] = (uint8_t)((code_a & 15) | (code_b & 15) << 4);
        high |= code_a | code_b;
        any |= word;
    }
    *signs |= any;
    return high & 0xF0;
}

/* The same from 16-bit floats. */
EACH_PROCESSOR
static unsigned pair_halves(const u16 *restrict first, const u16 *restrict second, Py_ssize_t count, unsigned base, u16 *restrict rest,
                            uint8_t *restrict codes, unsigned *restrict signs)
{
    uint16_t high = 0, any = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint16_t a = first[i], b = second[i];
        uint16_t code_a = (uint16_t)((a >> 7) - base) & 0xFF, code_b = (uint16_t)((b >> 7) - base) & 0xFF;
        uint16_t word = (uint16_t)REST_OF(a, b);
        rest[i] = word;
        codes[i] = (uint8_t)((code_a & 15) | (code_b & 15) << 4);
        high |= code_a | code_b;
        any |= word;
    }
    *signs |= any;
    return high & 0xF0;
}

/* Codes from exponents that came apart. */
EACH_PROCESSOR
static unsigned code_exponents(const uint8_t *restrict first, const uint8_t *restrict second, Py_ssize_t count, unsigned base,
                               uint8_t *restrict codes)
{
    uint8_t high = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint8_t code_a = (uint8_t)(first[i] - base), code_b = (uint8_t)(second[i] - base);
        codes[i] = (uint8_t)((code_a & 15) | (code_b & 15) << 4);
        high |= code_a | code_b;
    }
    return high & 0xF0;
}

EACH_PROCESSOR
static void unpair_floats(const u16 *restrict low_first, const u16 *restrict low_second, const u16 *restrict rest,
                          const uint8_t *restrict codes, Py_ssize_t count, unsigned base, u32 *restrict first, u32 *restrict second)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t word = rest[i], pair = codes[i];
        uint32_t exponent_a = ((pair & 15) + base) & 0xFF, exponent_b = ((pair >> 4) + base) & 0xFF;
        first[i] = ((word & REST) | exponent_a << 7) << 16 | low_first[i];
        second[i] = (SECOND_REST(word) | exponent_b << 7) << 16 | low_second[i];
    }
}

EACH_PROCESSOR
static void unpair_halves(const u16 *restrict rest, const uint8_t *restrict codes, Py_ssize_t count, unsigned base, u16 *restrict first,
                          u16 *restrict second)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        uint16_t word = rest[i], pair = codes[i];
        uint16_t exponent_a = (uint16_t)((pair & 15) + base) & 0xFF, exponent_b = (uint16_t)((pair >> 4) + base) & 0xFF;
        first[i] = (uint16_t)((word & REST) | exponent_a << 7);
        second[i] = (uint16_t)(SECOND_REST(word) | exponent_b << 7);
    }
}

/* The floats of a chunk whose exponents have no code. Floats of one byte are exponents that came apart. Returns 0 where there is no room. */
static int list_outside(const uint8_t *raw, int itemsize, Py_ssize_t num_pairs, Py_ssize_t start, Py_ssize_t count, unsigned base,
                        outside_t *outside)
{
    for (int half = 0; half < 2; half++) {
        Py_ssize_t *num = half ? &outside->num_second : &outside->num_first;
        Py_ssize_t from = half ? outside->room : 0, shift = half ? num_pairs : 0;
        for (Py_ssize_t i = start + shift; i < start + shift + count; i++) {
            unsigned exponent = itemsize == 1 ? raw[i] : (*(const u16 *)(raw + (i + 1) * itemsize - 2) >> 7) & 0xFF;
            if (((exponent - base) & 0xFF) < NUM_CODES)
                continue;
            if (*num == outside->room)
                return 0;
            outside->positions[from + *num] = i;
            outside->exponents[from + *num] = (uint8_t)exponent;
            ++*num;
        }
    }
    return 1;
}

static int pair_block(const uint8_t *raw, int itemsize, Py_ssize_t num_pairs, unsigned base, uint8_t *low, uint8_t *rest, uint8_t *codes,
                      unsigned *signs, outside_t *outside)
{
    for (Py_ssize_t start = 0; start < num_pairs; start += CHUNK) {
        Py_ssize_t count = num_pairs - start < CHUNK ? num_pairs - start : CHUNK;
        const uint8_t *first = raw + start * itemsize, *second = raw + (num_pairs + start) * itemsize;
        u16 *rests = (u16 *)(rest + 2 * start);
        unsigned high = itemsize == 4
            ? pair_floats((const u32 *)first, (const u32 *)second, count, base, (u16 *)(low + 2 * start),
                          (u16 *)(low + 2 * (num_pairs + start)), rests, codes + start, signs)
            : pair_halves((const u16 *)first, (const u16 *)second, count, base, rests, codes + start, signs);
        if (high && !list_outside(raw, itemsize, num_pairs, start, count, base, outside))
            return 0;
    }
    return 1;
}

static int code_block(const uint8_t *exponents, Py_ssize_t num_pairs, unsigned base, uint8_t *codes, outside_t *outside)
{
    for (Py_ssize_t start = 0; start < num_pairs; start += CHUNK) {
        Py_ssize_t count = num_pairs - start < CHUNK ? num_pairs - start : CHUNK;
        unsigned high = code_exponents(exponents + start, exponents + num_pairs + start, count, base, codes + start);
        if (high && !list_outside(exponents, 1, num_pairs, start, count, base, outside))
            return 0;
    }
    return 1;
}

/* What the second floats list goes behind what the first ones do. */
static void close_gap(outside_t *outside)
{
    memmove(outside->positions + outside->num_first, outside->positions + outside->room, 8 * (size_t)outside->num_second);
    memmove(outside->exponents + outside->num_first, outside->exponents + outside->room, (size_t)outside->num_second);
}

static void unpair_block(uint8_t *out, int itemsize, Py_ssize_t num_pairs, unsigned base, const uint8_t *low, const uint8_t *rest,
                         const uint8_t *codes)
{
    for (Py_ssize_t start = 0; start < num_pairs; start += CHUNK) {
        Py_ssize_t count = num_pairs - start < CHUNK ? num_pairs - start : CHUNK;
        uint8_t *first = out + start * itemsize, *second = out + (num_pairs + start) * itemsize;
        const u16 *rests = (const u16 *)(rest + 2 * start);
        if (itemsize == 4)
            unpair_floats((const u16 *)(low + 2 * start), (const u16 *)(low + 2 * (num_pairs + start)), rests, codes + start, count, base,
                          (u32 *)first, (u32 *)second);
        else
            unpair_halves(rests, codes + start, count, base, (u16 *)first, (u16 *)second);
    }
}

/* The rests of the last eighth go, bit by bit, to where the signs of the others would be. */
EACH_PROCESSOR
static void fold_rests(u16 *rest, Py_ssize_t part)
{
    for (int k = 0; k < 7; k++)
        for (Py_ssize_t i = 0; i < part; i++)
            rest[k * part + i] |= (uint16_t)(rest[7 * part + i] << (7 - k)) & SIGNS;
}

EACH_PROCESSOR
static void unfold_rests(const u16 *restrict folded, Py_ssize_t part, u16 *restrict rest)
{
    for (Py_ssize_t i = 0; i < part; i++) {
        uint16_t last = 0;
        for (int k = 0; k < 7; k++) {
            uint16_t word = folded[k * part + i];
            rest[k * part + i] = word & MANTISSAS;
            last |= (uint16_t)((word & SIGNS) >> (7 - k));
        }
        rest[7 * part + i] = last;
    }
}

/* -- the module -------------------------------------------------------------------------------------------------------------------- */

static int too_short(const Py_buffer *buffer, Py_ssize_t num_bytes, const char *name)
{
    if (buffer->len >= num_bytes)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes and must have %zd", name, buffer->len, num_bytes);
    return 1;
}

static int is_odd(int itemsize, Py_ssize_t num_pairs, int base)
{
    if ((itemsize == 2 || itemsize == 4) && num_pairs >= 0 && num_pairs < ((Py_ssize_t)1 << 40) && base >= 0 && base <= 255)
        return 0;
    PyErr_Format(PyExc_ValueError, "floats of %d bytes, %zd pairs, base %d", itemsize, num_pairs, base);
    return 1;
}

PyDoc_STRVAR(pair_doc,
"pair(raw, itemsize, num_pairs, base, low, rest, codes, positions, exponents) -> (num_outside, signs)\n\n"
"Takes floats apart. positions (int64) and exponents (uint8) have room for the same number of floats, of which each half may list half;\n"
"num_outside is -1 where that was not enough. signs is the OR of all rests.");

static PyObject *kernels_pair(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer raw, low, rest, codes, positions, exponents;
    int itemsize, base, done = 0;
    Py_ssize_t num_pairs;
    PyObject *result = NULL;
    unsigned signs = 0;
    if (!PyArg_ParseTuple(args, "y*iniw*w*w*w*w*", &raw, &itemsize, &num_pairs, &base, &low, &rest, &codes, &positions, &exponents))
        return NULL;
    if (is_odd(itemsize, num_pairs, base) || too_short(&raw, 2 * num_pairs * itemsize, "raw") ||
        too_short(&low, itemsize == 4 ? 4 * num_pairs : 0, "low") || too_short(&rest, 2 * num_pairs, "rest") ||
        too_short(&codes, num_pairs, "codes") || too_short(&exponents, positions.len / 8, "exponents"))
        goto end;
    outside_t outside = {positions.buf, exponents.buf, positions.len / 16, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    done = pair_block(raw.buf, itemsize, num_pairs, (unsigned)base, low.buf, rest.buf, codes.buf, &signs, &outside);
    if (done)
        close_gap(&outside);
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("nI", done ? outside.num_first + outside.num_second : (Py_ssize_t)-1, signs);
end:
    PyBuffer_Release(&raw);
    PyBuffer_Release(&low);
    PyBuffer_Release(&rest);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&exponents);
    return result;
}

PyDoc_STRVAR(code_doc,
"code(exponents, num_pairs, base, codes, positions, outside) -> num_outside\n\n"
"What pair does with the exponents, of floats that came apart; outside is pair's exponents.");

static PyObject *kernels_code(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer exponents, codes, positions, outside_exponents;
    int base, done = 0;
    Py_ssize_t num_pairs;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*niw*w*w*", &exponents, &num_pairs, &base, &codes, &positions, &outside_exponents))
        return NULL;
    if (is_odd(2, num_pairs, base) || too_short(&exponents, 2 * num_pairs, "exponents") || too_short(&codes, num_pairs, "codes") ||
        too_short(&outside_exponents, positions.len / 8, "outside"))
        goto end;
    outside_t outside = {positions.buf, outside_exponents.buf, positions.len / 16, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    done = code_block(exponents.buf, num_pairs, (unsigned)base, codes.buf, &outside);
    if (done)
        close_gap(&outside);
    Py_END_ALLOW_THREADS
    result = PyLong_FromSsize_t(done ? outside.num_first + outside.num_second : (Py_ssize_t)-1);
end:
    PyBuffer_Release(&exponents);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&positions);
    PyBuffer_Release(&outside_exponents);
    return result;
}

PyDoc_STRVAR(unpair_doc, "unpair(out, itemsize, num_pairs, base, low, rest, codes)\n\nThe inverse of pair, for floats that have a code.");

static PyObject *kernels_unpair(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer out, low, rest, codes;
    int itemsize, base;
    Py_ssize_t num_pairs;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "w*iniy*y*y*", &out, &itemsize, &num_pairs, &base, &low, &rest, &codes))
        return NULL;
    if (is_odd(itemsize, num_pairs, base) || too_short(&out, 2 * num_pairs * itemsize, "out") ||
        too_short(&low, itemsize == 4 ? 4 * num_pairs : 0, "low") || too_short(&rest, 2 * num_pairs, "rest") ||
        too_short(&codes, num_pairs, "codes"))
        goto end;
    Py_BEGIN_ALLOW_THREADS
    unpair_block(out.buf, itemsize, num_pairs, (unsigned)base, low.buf, rest.buf, codes.buf);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    PyBuffer_Release(&out);
    PyBuffer_Release(&low);
    PyBuffer_Release(&rest);
    PyBuffer_Release(&codes);
    return result;
}

PyDoc_STRVAR(fold_doc, "fold(rest)\n\nFolds eight parts of 16-bit words without signs into the first seven, in place.");

static PyObject *kernels_fold(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer rest;
    if (!PyArg_ParseTuple(args, "w*", &rest))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fold_rests(rest.buf, rest.len / 16);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&rest);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(unfold_doc, "unfold(folded, rest)\n\nThe inverse of fold: seven parts of 16-bit words to eight.");

static PyObject *kernels_unfold(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer folded, rest;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*w*", &folded, &rest))
        return NULL;
    if (!too_short(&folded, rest.len / 16 * 14, "folded")) {
        Py_BEGIN_ALLOW_THREADS
        unfold_rests(folded.buf, rest.len / 16, rest.buf);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&folded);
    PyBuffer_Release(&rest);
    return result;
}

static PyMethodDef methods[] = {
    {"pair", kernels_pair, METH_VARARGS, pair_doc},
    {"code", kernels_code, METH_VARARGS, code_doc},
    {"unpair", kernels_unpair, METH_VARARGS, unpair_doc},
    {"fold", kernels_fold, METH_VARARGS, fold_doc},
    {"unfold", kernels_unfold, METH_VARARGS, unfold_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", "Inner loops, compiled.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModule_Create(&module);
}
