"""Shared memory of all programs; a stamp of every byte holds the number of barriers passed and the thread."""

import numpy as np

from virtual_gpu.program import SHARED_BASE, FaultError

_MANY = 1023  # in place of a thread: several


class SharedMemory:
    """Bytes [programs, size]; threads are numbered through all programs."""

    def __init__(self, programs, size, threads):
        self._size, self._threads = size, threads
        self.data = np.full(programs * size + 16, 0xFF, np.uint8)
        self._writer, self._reader = np.zeros((2, len(self.data)), np.int32)
        # on their way; read by matrix units; unseen by them
        self._in_flight, self._being_read, self._not_fenced = np.zeros((3, len(self.data)), np.bool_)
        self._epoch = np.ones(programs, np.int32)
        self._copies = []  # places [n, bytes], threads, groups
        self._committed = np.zeros(programs * threads, np.int64)

    def places(self, threads, addresses, size):
        """Where each thread's `size` bytes lie: [threads, size]."""
        if (addresses % size).any():
            raise FaultError(f"shared access of {size} bytes that is not aligned")
        offset = addresses.astype(np.int64) - SHARED_BASE
        if (offset < 0).any() or (offset + size > self._size).any():
            raise FaultError(f"shared access of {size} bytes beyond {self._size}")
        return (threads // self._threads * self._size + offset)[:, None] + np.arange(size)

    def load(self, threads, places):
        stamp = self._stamp(threads)
        self._check_read(stamp, places)
        before = self._reader[places]
        new = before >> 10 != stamp >> 10
        self._reader[places] = np.where(new | (before == stamp), stamp, stamp | _MANY)
        self._reader[places[self._reader[places] != stamp]] |= _MANY
        return self.data[places]

    def store(self, threads, places, values):
        """Two threads may write one value, or nearly: one may round before a fused add, the other after."""
        self._check_write(self._stamp(threads), places, values)
        self.data[places] = values
        stored = self.data[places]
        if (stored != values).any() and not _nearly(stored, values):
            raise FaultError("threads store different values to one place in shared memory")
        self._written(threads, places)

    def _written(self, threads, places):
        self._writer[places] = self._stamp(threads)
        self._not_fenced[places] = True

    def barrier(self, programs):
        self._epoch[programs] += 1

    def epoch(self, program):
        return int(self._epoch[program])

    def copy(self, threads, places, values):
        """Begin to copy bytes: from now until it was waited for they are no one's."""
        self._check_write(self._stamp(threads), places, values)
        self.data[places] = values
        self._in_flight[places] = True
        self._copies.append((places, threads, self._committed[threads]))

    def commit(self, threads):
        self._committed[threads] += 1

    def wait(self, threads, pending):
        """Deliver all but the last `pending` groups of these threads."""
        left = []
        for places, owners, groups in self._copies:
            done = np.isin(owners, threads) & (groups < self._committed[owners] - pending)
            self._in_flight[places[done]] = False
            self._written(owners[done], places[done])
            if not done.all():
                left.append((places[~done], owners[~done], groups[~done]))
        self._copies = left

    def _bytes_of(self, threads):
        for program in np.unique(threads // self._threads).tolist():
            yield program, slice(program * self._size, (program + 1) * self._size)

    def fence(self, threads):
        """Let matrix units see what these threads have written, or others before a barrier."""
        for program, all_bytes in self._bytes_of(threads):
            writer = self._writer[all_bytes]
            mine = threads[threads // self._threads == program] % self._threads
            seen = (writer >> 10 < self._epoch[program]) | np.isin(writer & _MANY, mine)
            self._not_fenced[all_bytes] &= ~seen

    def read_by_matrix_unit(self, threads, places):
        """The bytes there, for an instruction that reads them until it was waited for."""
        self._check_read(self._stamp(threads), places)
        if self._not_fenced[places].any():
            raise FaultError("a matrix unit reads shared memory before a proxy fence")
        self.keep_reading(places)
        return self.data[places]

    def keep_reading(self, places):
        self._being_read[places] = True

    def matrix_units_done(self, threads, known_to_all=True):
        """Where each warp knows it of its own alone, others may write there after a barrier."""
        for program, all_bytes in self._bytes_of(threads):
            if not known_to_all:
                read = self._being_read[all_bytes]
                self._reader[all_bytes][read] = self._epoch[program] << 10 | _MANY
            self._being_read[all_bytes] = False

    def _stamp(self, threads):
        epoch = self._epoch[threads // self._threads]
        return ((epoch << 10) | (threads % self._threads).astype(np.int32))[:, None]

    def _check_read(self, stamp, places):
        if self._in_flight[places].any():
            raise FaultError("read of shared memory that a copy has not delivered")
        writer = self._writer[places]
        if (writer == 0).any():
            raise FaultError("read of shared memory that was never written")
        if ((writer >> 10 == stamp >> 10) & (writer != stamp)).any():
            raise FaultError("race: read of what another thread wrote since the last barrier")

    def _check_write(self, stamp, places, values):
        if self._in_flight[places].any():
            raise FaultError("write to shared memory that a copy will overwrite")
        if self._being_read[places].any():
            raise FaultError("race: write to what a matrix unit may still read")
        reader, writer = self._reader[places], self._writer[places]
        if ((reader >> 10 == stamp >> 10) & (reader != stamp)).any():
            raise FaultError("race: write to what another thread read since the last barrier")
        others = (writer >> 10 == stamp >> 10) & (writer != stamp)
        if (others & (self.data[places] != values)).any():
            raise FaultError("race: write to what another thread wrote since the last barrier")


def _nearly(one, other):
    """Whether bytes are float32 that differ by the last bits of the largest of them."""
    if one.shape[1] % 4:
        return False
    one, other = (np.ascontiguousarray(each).view(np.float32) for each in (one, other))
    return bool((np.abs(one - other) <= 2.0**-20 * np.abs(one).max()).all())
