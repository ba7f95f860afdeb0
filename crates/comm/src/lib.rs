//! Everything that moves bytes between the processes of one server.
//!
//! | module | plane | what |
//! |---|---|---|
//! | [`link`] | control | ZeroMQ sockets typed by message: PUSH/PULL queues and rank 0's broadcast |
//! | [`group`] | control | [`ProcessGroup`]: barrier, gather and broadcast of small things among ranks |
//! | [`collective`] | data | [`Collective`]: sums and gathers of tensors; [`OneRank`] is the identity |
//! | [`shm`] | both | `ProcessGroup` and `Collective` over shared memory, for ranks of one host |
//! | [`gloo`] | both | the same over TCP, for ranks of several hosts |
//! | [`secret`], [`trusted`], [`meeting`] | – | how processes of several hosts come to know each other |
//! | [`interface`] | – | which network interface has an address |
//! | [`watch`] | – | the page that shows where every process stands |
//! | [`library`] | – | shared libraries found when the program runs, for the devices |
//! | [`nccl`] | data | `Collective` over NCCL, for ranks with a GPU each |
//! | [`mod@bench`] | – | latencies of the above, for `lockstep bench comm` |
//!
//! **Invariants:** no wait is unbounded unless it says so ([`Patience::Idle`]); every wait ends on
//! an abort; nothing that a dead process leaves behind survives it; bytes from another process are
//! checked before they are believed.
//!
//! Reading order: [`collective`] and [`group`] (the contracts), [`shm`], [`link`]; for several hosts [`secret`],
//! [`trusted`], [`meeting`], [`gloo`].

pub mod bench;
pub mod collective;
pub mod fuzzing;
pub mod gloo;
pub mod group;
pub mod interface;
pub mod library;
pub mod link;
mod mapping;
pub mod meeting;
pub mod nccl;
mod random;
pub mod secret;
pub mod shm;
pub mod trusted;
pub mod watch;

pub use collective::{Collective, CollectiveError, OneRank, StreamHandle};
pub use gloo::{GlooCollective, GlooGroup, Mesh};
pub use group::{Patience, ProcessGroup};
pub use link::{
    AsyncReceiver, BroadcastReceiver, BroadcastSender, Context, Endpoint, LinkError, Receiver, Sender,
};
pub use nccl::NcclCollective;
pub use shm::{AbortHandle, SharedRegion, ShmCollective, ShmGroup, ShmLayout, ShmOptions};
