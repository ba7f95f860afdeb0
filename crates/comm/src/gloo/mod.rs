//! Process group and collectives over real Gloo (TCP), for ranks on several hosts.
//!
//! A rank joins one [`Mesh`] with the other ranks of its replica: a TCP connection to each, by Gloo's transport,
//! bound to the address that is asked for. Any number of groups of these ranks then share the mesh, each in a *lane*
//! of its own ([`GlooGroup`], [`GlooCollective`]). Groups whose ranks lie on one host use [`crate::shm`] instead.
//!
//! **Same results.** Gloo's own all-reduce sums in the order of a ring. Only its transport is used here; a sum is the
//! binary tree of the shared-memory collective, by the same code, so that an answer has the same bits wherever the
//! ranks lie.
//!
//! **Protocol.** An operation is one or two *rounds*: every member sends one message to every other and waits for
//! theirs. A message is a header (operation, dtype and count in one word; bytes) and a payload of at most one piece;
//! a receiver always has room for a whole piece, so what another rank announces is compared and never used as a
//! length. Each member keeps two receipts posted for every other, by turns: nobody can be more than one round ahead,
//! so a message of the round after next never meets a buffer that is still read (`lane`).
//!
//! **Failure** is that of the shared-memory group: a wait has a deadline, names the rank that is missing, and aborts
//! this host's ranks through the abort word of their shared memory, which also ends every wait here. A connection
//! that ends is [`CollectiveError::Lost`](crate::CollectiveError): somebody else knows why.
//!
//! **Trust.** Gloo neither encrypts nor authenticates. Before anything else each pair shows that it knows the server's
//! key (`mesh`), which finds strangers and mix-ups; tensors then cross the wire in the clear. Whoever can write into
//! these connections can end the server. Use a private network.
//!
//! Traps of the Gloo of 2022 that Debian ships: an exception on its own thread ends the process, and a message longer
//! than its receipt is one; a time-out closes every pair of the context; a sum has no bf16.
//!
//! The feature `gloo` builds `shim.cc` (Debian: libgloo-dev); without it joining a mesh is an error that says so.
//!
//! Reading order: `shim.cc`, `transport`, `mesh`, `lane`, `group`, `collective`.

#[cfg(feature = "gloo")]
mod ffi;
#[cfg(feature = "gloo")]
mod transport;
#[cfg(not(feature = "gloo"))]
#[path = "absent.rs"]
mod transport;

mod collective;
mod group;
mod lane;
pub(crate) mod mesh;
mod transport_types;

pub use collective::GlooCollective;
pub use group::GlooGroup;
pub use mesh::{Mesh, MeshPlace};

/// Whether this binary has it.
pub const IS_BUILT: bool = cfg!(feature = "gloo");
