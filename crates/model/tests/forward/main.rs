//! The decoder as rank threads over real shared memory: right, and the same to the bit however it runs.

mod bit_equality;
mod group;
mod reference;
