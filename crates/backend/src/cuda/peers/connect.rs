//! How the GPUs of a group of ranks come to write to each other's memory.
//!
//! Every rank shows a [`Card`]; then it opens the others' inboxes: by a pointer where the other rank is a thread of the
//! same process, by CUDA IPC otherwise. All ranks hear how it went everywhere, and decide alike.
//! **Collective:** everything here, for all ranks of the group. Nothing returns before the others have heard.

use super::super::device::Device;
use super::super::driver::{Address, Handle, LentMemory};
use crate::{BackendError, Result};
use bytemuck::{Pod, Zeroable};
use lockstep_comm::group::{Patience, ProcessGroup};
use std::ffi::c_int;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER_ACCESS: u32 = 1;
/// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
const ALREADY_OPEN: c_int = 704;
/// Room for one rank's verdict, in bytes.
const VERDICT_BYTES: usize = 512;

/// What a rank shows the others.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub(in crate::cuda) struct Card {
    pub uuid: [u8; 16],
    pub pid: u32,
    /// Index of its GPU among those of this machine, and what the driver calls it.
    pub index: u32,
    pub handle: i32,
    pub sm_count: u32,
    /// Whether it has lent an inbox.
    pub has_inbox: u32,
    /// Its host; process, context and the driver's number of the GPU mean something there only.
    pub host: u32,
    /// The inbox and the context in its own process.
    pub inbox: u64,
    pub context: u64,
    pub lent: [u8; 64],
}

impl Card {
    /// The card of this rank; `inbox` is what it lends, if it could make one.
    pub fn of(device: &Device, inbox: Option<Address>) -> Result<Self> {
        let mut card = Self {
            pid: std::process::id(),
            host: device.host() as u32,
            index: device.index as u32,
            handle: device.handle,
            sm_count: device.sm_count as u32,
            context: device.context as u64,
            ..Self::zeroed()
        };
        // SAFETY: the out-pointer is valid for 16 bytes and the device exists.
        let code = unsafe { (device.api.device_uuid)(&raw mut card.uuid, device.handle) };
        device.check(code, "reading the GPU's identity")?;
        if let Some(inbox) = inbox {
            let mut lent = LentMemory([0; 64]);
            // SAFETY: the inbox is an allocation of this context; the out-pointer is valid.
            let code = unsafe { (device.api.lend)(&raw mut lent, inbox) };
            // A thread of the same process can do without.
            let could_lend = device.check(code, "lending memory to other processes").is_ok();
            (card.has_inbox, card.inbox) = (1, inbox);
            card.lent = if could_lend { lent.0 } else { [0; 64] };
        }
        Ok(card)
    }
}

/// Every rank's card, by rank.
pub(in crate::cuda) fn exchange(group: &mut dyn ProcessGroup, mine: &Card) -> Result<Vec<Card>> {
    let mut all = vec![0u8; size_of::<Card>() * group.size()];
    group.all_gather(bytemuck::bytes_of(mine), &mut all, Patience::Idle)?;
    Ok(all.chunks_exact(size_of::<Card>()).map(bytemuck::pod_read_unaligned).collect())
}

/// Errors when two ranks are on one GPU and `may_share` does not say that they may be.
pub(in crate::cuda) fn check_one_rank_a_gpu(cards: &[Card], may_share: bool) -> Result<()> {
    match two_on_one_gpu(cards).filter(|_| !may_share) {
        None => Ok(()),
        Some((first, second)) => Err(BackendError::Unsupported(format!(
            "ranks {first} and {second} are both on GPU {}{}; give each rank a GPU of its own by --gpu-ids, or pass \
             --share-gpu to test on fewer",
            cards[first].index,
            match cards[first].host == cards[second].host {
                true => String::new(),
                false => format!(", which hosts {} and {} share", cards[first].host, cards[second].host),
            }
        ))),
    }
}

/// The first two ranks that are on one GPU.
fn two_on_one_gpu(cards: &[Card]) -> Option<(usize, usize)> {
    let earlier = |rank: usize| cards[..rank].iter().position(|card| card.uuid == cards[rank].uuid);
    (0..cards.len()).find_map(|rank| earlier(rank).map(|first| (first, rank)))
}

/// How many ranks are on the most crowded GPU.
pub(super) fn most_on_one_gpu(cards: &[Card]) -> usize {
    cards.iter().map(|card| cards.iter().filter(|c| c.uuid == card.uuid).count()).max().unwrap_or(1)
}

/// Whether some ranks are threads that use one context; what follows from it concerns all ranks.
pub(in crate::cuda) fn share_a_context(cards: &[Card]) -> bool {
    let place = |card: &Card| (card.host, card.pid, card.context);
    (1..cards.len()).any(|rank| cards[..rank].iter().any(|card| place(card) == place(&cards[rank])))
}

/// The addresses of all inboxes in this process, by rank; errors with the reason why one cannot be had.
pub(super) fn open_inboxes(
    device: &Device,
    rank: usize,
    cards: &[Card],
) -> std::result::Result<Vec<Address>, String> {
    let open = |peer: usize| match peer == rank {
        true => Ok(cards[peer].inbox),
        false => open_inbox(device, (rank, peer), cards),
    };
    (0..cards.len()).map(open).collect()
}

/// The address in this process, that of rank `rank`, of the inbox of rank `peer`; errors with the reason why it cannot be
/// had.
pub(in crate::cuda) fn open_inbox(
    device: &Device,
    (rank, peer): (usize, usize),
    cards: &[Card],
) -> std::result::Result<Address, String> {
    let (mine, theirs) = (&cards[rank], &cards[peer]);
    opened(device, mine, theirs).map_err(|problem| {
        format!("rank {rank} (GPU {}) and rank {peer} (GPU {}): {problem}", device.index, theirs.index)
    })
}

fn opened(device: &Device, mine: &Card, theirs: &Card) -> std::result::Result<Address, String> {
    let words = |error: BackendError| error.to_string();
    if mine.host != theirs.host {
        return Err("they are on different hosts".into());
    }
    if theirs.has_inbox == 0 {
        return Err("there is no memory to write to".into());
    }
    if mine.uuid != theirs.uuid {
        let mut reaches = 0;
        // SAFETY: the out-pointer is valid and both devices exist.
        let code = unsafe { (device.api.can_access_peer)(&raw mut reaches, device.handle, theirs.handle) };
        device.check(code, "asking which GPUs reach each other").map_err(words)?;
        if reaches == 0 {
            return Err("the GPUs cannot write to each other's memory".into());
        }
    }
    if mine.pid == theirs.pid {
        if mine.context != theirs.context {
            // SAFETY: a context of this process, which lives as long as the process.
            let code = unsafe { (device.api.context_open_peer)(theirs.context as Handle, 0) };
            if code != ALREADY_OPEN {
                device.check(code, "opening the memory of another GPU").map_err(words)?;
            }
        }
        return Ok(theirs.inbox);
    }
    if theirs.lent == [0; 64] {
        return Err("its driver lends no memory to other processes".into());
    }
    let mut inbox = 0;
    // SAFETY: the out-pointer is valid; the handle is what the other rank's driver gave.
    let code = unsafe { (device.api.borrow)(&raw mut inbox, LentMemory(theirs.lent), LAZY_PEER_ACCESS) };
    device.check(code, "opening memory that another process lends").map_err(words)?;
    Ok(inbox)
}

/// The first reason, by rank, why some rank cannot take part; `None` when all can.
pub(in crate::cuda) fn agree(group: &mut dyn ProcessGroup, mine: Option<&str>) -> Result<Option<String>> {
    let mut slot = [0u8; VERDICT_BYTES];
    if let Some(reason) = mine {
        let reason = if reason.is_empty() { "no reason given" } else { reason };
        let end = (0..=reason.len().min(VERDICT_BYTES)).rev().find(|end| reason.is_char_boundary(*end));
        let text = &reason.as_bytes()[..end.unwrap_or(0)];
        slot[..text.len()].copy_from_slice(text);
    }
    let mut all = vec![0u8; VERDICT_BYTES * group.size()];
    group.all_gather(&slot, &mut all, Patience::Idle)?;
    let reasons = all.chunks_exact(VERDICT_BYTES).map(|slot| {
        let text = slot.split(|byte| *byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned()
    });
    Ok(reasons.into_iter().find(|reason| !reason.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_comm::shm::{SharedRegion, ShmGroup, ShmLayout, ShmOptions};
    use std::sync::Arc;

    fn card(gpu: u8) -> Card {
        Card { uuid: [gpu; 16], ..Card::zeroed() }
    }

    #[test]
    fn ranks_on_one_gpu_are_found() {
        assert_eq!(two_on_one_gpu(&[card(1), card(2), card(3)]), None);
        assert_eq!(two_on_one_gpu(&[card(1), card(2), card(2), card(1)]), Some((1, 2)));
        assert_eq!(most_on_one_gpu(&[card(1), card(2), card(2), card(2)]), 3);
        assert_eq!(most_on_one_gpu(&[card(1), card(2)]), 1);
        let process = |pid: u32, context: u64| Card { pid, context, ..card(1) };
        assert!(share_a_context(&[process(7, 1), process(8, 1), process(7, 1)]));
        assert!(!share_a_context(&[process(7, 1), process(8, 1), process(7, 2)]));
        let elsewhere = Card { host: 1, ..process(7, 1) };
        assert!(!share_a_context(&[process(7, 1), elsewhere]), "the same numbers on another host");
        let refused = check_one_rank_a_gpu(&[process(7, 1), elsewhere], false).unwrap_err().to_string();
        assert!(refused.contains("ranks 0 and 1") && refused.contains("hosts 0 and 1 share"), "{refused}");
    }

    #[test]
    fn all_ranks_hear_the_first_reason_and_see_all_cards() {
        let fd = SharedRegion::create(ShmLayout::new(2, ShmLayout::SLOT_BYTES_DEFAULT).unwrap()).unwrap();
        let region = Arc::new(SharedRegion::map(&fd).unwrap());
        let heard = std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                let region = Arc::clone(&region);
                scope.spawn(move || {
                    let mut group = ShmGroup::new(region, rank, ShmOptions::for_ranks(2)).unwrap();
                    let cards = exchange(&mut group, &card(rank as u8)).unwrap();
                    assert_eq!(cards, [card(0), card(1)]);
                    let long = "é".repeat(VERDICT_BYTES);
                    let first = agree(&mut group, (rank == 1).then_some("no peer access")).unwrap();
                    let cut = agree(&mut group, Some(&long)).unwrap().unwrap();
                    assert_eq!(cut.len(), VERDICT_BYTES);
                    (first, agree(&mut group, None).unwrap())
                })
            });
            ranks.map(|rank| rank.join().unwrap())
        });
        assert!(heard.iter().all(|h| *h == (Some("no peer access".into()), None)), "{heard:?}");
    }
}
