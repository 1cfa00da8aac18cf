"""Write what is left of a file that other processes have filled."""

from __future__ import annotations

from core.arrays.checksum import BLOCK_BYTES, crc32
from core.engine.catalog.file_image import FileImage
from core.engine.plan.positions import Places
from core.publish.stage.files import StageStore


def finish_file(image: FileImage, stage: StageStore) -> None:
    """Write the bytes of a file around its arrays, which other processes have filled.

    A file without arrays is created.

    Raises:
        CheckpointingException: the file cannot be written.
    """
    stage.create(image.path, image.size)
    places = Places([image])

    def crc_of(name: str) -> int:
        number = places.number_of(name)
        assert number is not None, "a literal states the CRC of an array of its own file"
        return _crc_of_range(stage, image.path, places.offset_of(number), places.bytes_of(number))

    for offset, data in image.literals(crc_of):
        stage.write(image.path, offset, data)


def _crc_of_range(stage: StageStore, path: str, offset: int, n_bytes: int) -> int:
    """Return the CRC-32 of bytes that several processes have written."""
    buffer = memoryview(bytearray(min(BLOCK_BYTES, n_bytes)))
    crc = 0
    for start in range(0, n_bytes, BLOCK_BYTES):
        piece = buffer[: min(BLOCK_BYTES, n_bytes - start)]
        stage.read_into(path, offset + start, piece)
        crc = crc32(piece, crc)
    return crc
