//! Run-time loaded bindings of the libnixl C interface.
