//! Everything that moves bytes between processes: ZeroMQ links, the CPU process group and the
//! tensor collectives.

pub mod collective;
pub mod group;
pub mod link;
