//! The thin front: everything is in the library.

fn main() {}
