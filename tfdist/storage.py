"""Folders and files of checkpoints: on a local disk, or wherever ``tf.io.gfile`` reaches.

Two classes with the same methods. TensorFlow is imported only for paths with a scheme (``gs://``,
``s3://``).
"""

import contextlib
import os
import shutil

_REMOTE_WRITE_BYTES = 1 << 24


def storage_of(path):
    """The :class:`LocalStorage` or :class:`RemoteStorage` for a path."""
    return RemoteStorage() if "://" in os.fspath(path) else LocalStorage()


class LocalStorage:
    """A file system whose rename is atomic (POSIX)."""

    renames = True

    def join(self, *parts):
        """A path."""
        return os.path.join(*parts)

    def names(self, folder):
        """The sorted names in a folder; none where it is missing. Raises OSError."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def exists(self, path):
        """Whether there is a file or folder. Raises OSError."""
        return os.path.exists(path)

    def size(self, path):
        """The size of a file in bytes. Raises OSError."""
        return os.path.getsize(path)

    def make_folder(self, path):
        """Makes a folder, and those above it."""
        os.makedirs(path, exist_ok=True)

    def write(self, path, chunks):
        """Makes a file of an iterable of buffers; it is on the disk on return.

        Raises:
            OSError: it exists already, or cannot be written.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                while view:
                    view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self, path):
        """The bytes of a small file."""
        with open(path, "rb") as file:
            return file.read()

    @contextlib.contextmanager
    def reading(self, path):
        """Context with ``read_into(buffer, offset) -> number of bytes``, for several threads."""
        fd = os.open(path, os.O_RDONLY)

        def read_into(buffer, offset):
            view, done = memoryview(buffer).cast("B"), 0
            while done < len(view):
                count = os.preadv(fd, [view[done:]], offset + done)
                if count == 0:
                    break
                done += count
            return done

        try:
            yield read_into
        finally:
            os.close(fd)

    def sync_folder(self, path):
        """Returns when the names in a folder are on the disk."""
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, path, new):
        """Gives a file or folder another name, atomically."""
        os.rename(path, new)

    def remove(self, folder):
        """Removes a folder with all that is in it."""
        shutil.rmtree(folder)


class RemoteStorage:
    """An object store, where a folder cannot be renamed but a file appears whole."""

    renames = False

    def __init__(self):
        import tensorflow as tf

        self._gfile = tf.io.gfile
        self._not_found = tf.errors.NotFoundError

    def join(self, *parts):
        """A path."""
        return self._gfile.join(*parts)

    def names(self, folder):
        """The sorted names in a folder; none where it is missing. Raises OSError."""
        with _as_os_errors():
            try:
                return sorted(name.rstrip("/") for name in self._gfile.listdir(folder))
            except self._not_found:
                return []

    def exists(self, path):
        """Whether there is a file or folder. Raises OSError."""
        with _as_os_errors():
            return self._gfile.exists(path)

    def size(self, path):
        """The size of a file in bytes. Raises OSError."""
        with _as_os_errors():
            return self._gfile.stat(path).length

    def make_folder(self, path):
        """Makes a folder, where the store has any."""
        with _as_os_errors():
            self._gfile.makedirs(path)

    def write(self, path, chunks):
        """Makes a file of an iterable of buffers. Raises OSError."""
        with _as_os_errors(), self._gfile.GFile(path, "wb") as file:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                for start in range(0, len(view), _REMOTE_WRITE_BYTES):
                    file.write(bytes(view[start : start + _REMOTE_WRITE_BYTES]))

    def read(self, path):
        """The bytes of a small file."""
        with _as_os_errors(), self._gfile.GFile(path, "rb") as file:
            return file.read()

    @contextlib.contextmanager
    def reading(self, path):
        """Context with ``read_into(buffer, offset) -> number of bytes``, for several threads."""

        def read_into(buffer, offset):
            view = memoryview(buffer).cast("B")
            with _as_os_errors(), self._gfile.GFile(path, "rb") as file:
                file.seek(offset)
                data = file.read(len(view))
            view[: len(data)] = data
            return len(data)

        yield read_into

    def sync_folder(self, path):
        """Nothing: what was written is there."""

    def remove(self, folder):
        """Removes a folder with all that is in it."""
        with _as_os_errors():
            self._gfile.rmtree(folder)


@contextlib.contextmanager
def _as_os_errors():
    """TensorFlow's errors about files as OSError."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(f"{type(error).__name__}: {error.message}") from error
