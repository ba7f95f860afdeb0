//! What every process group and every collective must do, checked with random operations against plain arithmetic.

use lockstep_comm::{Collective, Patience, ProcessGroup, StreamHandle};
use lockstep_core::DType;
use std::time::Duration;

/// Payload sizes lie around multiples of this.
pub const SLOT_BYTES: usize = 16 << 10;
/// Long enough that only a hang reaches it.
pub const LONG: Duration = Duration::from_secs(120);

/// xorshift64*: the same numbers on every rank for the same seed.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }
}

/// Element `i` of rank `rank` in round `round`: a float with a full mantissa.
pub fn value(round: u64, rank: usize, i: usize) -> f32 {
    let mut random = Random((round << 40) ^ ((rank as u64) << 32) ^ i as u64 ^ 0x9e37_79b9_7f4a_7c15);
    random.next();
    ((random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * (1 << (i % 7)) as f32
}

/// The sum that the design prescribes, one scalar at a time.
pub fn scalar_tree(terms: &[f32]) -> f32 {
    match terms {
        [one] => *one,
        _ => {
            let mut left = 1;
            while left * 2 < terms.len() {
                left *= 2;
            }
            scalar_tree(&terms[..left]) + scalar_tree(&terms[left..])
        }
    }
}

/// Sizes around every boundary: nothing, one, the one-shot limit, the slot, several slots.
fn count(random: &mut Random, element_bytes: usize) -> usize {
    let slot = SLOT_BYTES / element_bytes;
    match random.below(6) {
        0 => random.below(3),
        1 => random.below(300),
        2 => slot - 1 + random.below(3),
        3 => slot + random.below(slot),
        4 => slot * 2 - 1 + random.below(3),
        _ => slot + random.below(slot * 3),
    }
}

/// The members of one rank, whatever moves their bytes.
pub struct Rank {
    pub rank: usize,
    pub size: usize,
    pub group: Box<dyn ProcessGroup>,
    pub collective: Box<dyn Collective>,
}

impl Rank {
    /// Runs `rounds` random operations, the same on every rank, and checks every result.
    pub fn run(&mut self, seed: u64, rounds: u64) {
        let mut random = Random(seed);
        for round in 0..rounds {
            match random.below(8) {
                0 => self.group.barrier(Patience::Deadline(LONG)).unwrap(),
                1 => self.group_all_gather(round, &mut random),
                2 => self.group_broadcast(round, &mut random),
                3 => self.all_gather(round, &mut random),
                4 => self.send_recv(round, &mut random),
                5 => self.all_reduce_f32(round, &mut random),
                6 => self.all_reduce_half(round, &mut random, DType::Bf16),
                _ => self.all_reduce_half(round, &mut random, DType::F16),
            }
        }
    }

    fn group_all_gather(&mut self, round: u64, random: &mut Random) {
        let len = [0, 1, 8, 100, 64 << 10][random.below(5)];
        let mine = vec![(round as usize + self.rank) as u8; len];
        let mut all = vec![0; len * self.size];
        self.group.all_gather(&mine, &mut all, Patience::Deadline(LONG)).unwrap();
        for (i, byte) in all.iter().enumerate() {
            assert_eq!(*byte, (round as usize + i / len) as u8, "round {round}");
        }
    }

    fn group_broadcast(&mut self, round: u64, random: &mut Random) {
        let (len, root) = ([0, 1, 128, 70_000, 200_000][random.below(5)], random.below(self.size));
        let byte = |rank: usize, i: usize| (round as usize + rank * 31 + i) as u8;
        let mut data: Vec<u8> = (0..len).map(|i| byte(self.rank, i)).collect();
        self.group.broadcast(&mut data, root, Patience::Deadline(LONG)).unwrap();
        assert!(data.iter().enumerate().all(|(i, b)| *b == byte(root, i)), "round {round}");
    }

    fn all_gather(&mut self, round: u64, random: &mut Random) {
        let count = count(random, 4);
        let mine: Vec<f32> = (0..count).map(|i| value(round, self.rank, i)).collect();
        let mut all = vec![0f32; count * self.size];
        self.collective.all_gather_f32(&mine, &mut all).unwrap();
        for (i, got) in all.iter().enumerate() {
            assert_eq!(*got, value(round, i / count, i % count), "round {round}");
        }
    }

    fn send_recv(&mut self, round: u64, random: &mut Random) {
        let count = count(random, 4) * (1 + random.below(3));
        let from = random.below(self.size);
        let to = (from + 1 + random.below(self.size - 1)) % self.size;
        let mut data: Vec<f32> = (0..count).map(|i| value(round, self.rank, i)).collect();
        let at = data.as_mut_ptr().cast();
        // SAFETY: `count` floats, alive during the call.
        unsafe {
            if self.rank == from {
                self.collective.send(at, count, DType::F32, to, StreamHandle::HOST).unwrap();
            } else if self.rank == to {
                self.collective.recv(at, count, DType::F32, from, StreamHandle::HOST).unwrap();
                assert!(data.iter().enumerate().all(|(i, v)| *v == value(round, from, i)), "round {round}");
            }
        }
    }

    /// `size` terms of element `i`, in rank order.
    fn terms(&self, round: u64, i: usize) -> Vec<f32> {
        (0..self.size).map(|rank| value(round, rank, i)).collect()
    }

    fn all_reduce_f32(&mut self, round: u64, random: &mut Random) {
        let count = count(random, 4);
        let mut x: Vec<f32> = (0..count).map(|i| value(round, self.rank, i)).collect();
        self.collective.all_reduce_f32(&mut x).unwrap();
        for (i, got) in x.iter().enumerate() {
            let want = scalar_tree(&self.terms(round, i));
            assert_eq!(got.to_bits(), want.to_bits(), "round {round}, element {i} of {count}");
        }
    }

    fn all_reduce_half(&mut self, round: u64, random: &mut Random, dtype: DType) {
        let narrow = |x: f32| match dtype {
            DType::Bf16 => half::bf16::from_f32(x).to_bits(),
            _ => half::f16::from_f32(x).to_bits(),
        };
        let wide = |bits: u16| match dtype {
            DType::Bf16 => half::bf16::from_bits(bits).to_f32(),
            _ => half::f16::from_bits(bits).to_f32(),
        };
        let count = count(random, 2);
        let mut x: Vec<u16> = (0..count).map(|i| narrow(value(round, self.rank, i))).collect();
        // SAFETY: `count` elements of two bytes, alive during the call.
        unsafe {
            self.collective.all_reduce(x.as_mut_ptr().cast(), count, dtype, StreamHandle::HOST).unwrap()
        };
        for (i, got) in x.iter().enumerate() {
            let terms: Vec<f32> = self.terms(round, i).into_iter().map(|t| wide(narrow(t))).collect();
            assert_eq!(*got, narrow(scalar_tree(&terms)), "round {round}, element {i} of {count}");
        }
    }
}
