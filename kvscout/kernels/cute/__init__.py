"""From a CuTe DSL kernel to a file, and from the file to a callable.

A :class:`~.program.Program` names a kernel; :mod:`.compiler` makes a shared library of it, on a machine that needs no
GPU; :mod:`.store` says where that file lies; :mod:`.runtime` finds or makes it and loads it. A machine that was given
the files needs neither CuTe DSL nor a C compiler, only the package ``apache-tvm-ffi``.
"""
