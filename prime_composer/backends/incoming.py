"""Where the bytes of an answer are put as they come, so that a large one is in memory once."""

import numpy as np

ALIGNED = 64  # Bytes. An address for every dtype is a multiple of this.


class Incoming:
    """The bytes of an answer as they come; the last ``tail`` begin at an aligned address."""

    def __init__(self, length: int | None, tail: int):
        self.size = 0
        self._grown: bytearray | None = bytearray() if length is None else None
        if length is not None:
            space = np.empty(length + ALIGNED, np.uint8)
            first = -(space.ctypes.data + length - tail) % ALIGNED
            self._view = space.data[first : first + length]

    def add(self, chunk: bytes) -> None:
        """Store what came next."""
        begin, self.size = self.size, self.size + len(chunk)
        if self._grown is not None:
            self._grown += chunk
        else:
            self._view[begin : self.size] = chunk

    def view(self) -> memoryview:
        whole = self._view if self._grown is None else memoryview(self._grown)
        return whole[: self.size]
