// Owns the precompiled header that the libtorch targets share.
