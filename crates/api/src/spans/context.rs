//! Which trace a request belongs to: W3C Trace Context, level 1.

use axum::http::HeaderMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a `tracestate` that is passed on: what the recommendation asks for at least.
const STATE_BYTES_MAX: usize = 512;

/// A place in a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TraceContext {
    /// Not 0.
    pub(crate) trace: u128,
    /// The client's span; none in a trace that begins here.
    pub(crate) parent: Option<u64>,
    /// What vendors pass along; may be empty.
    pub(crate) state: String,
    /// Whether whoever began the trace wants it recorded.
    pub(crate) is_sampled: bool,
}

impl TraceContext {
    /// Of a request's `traceparent` and `tracestate`. `None` without one that is valid: the trace then begins here, as
    /// the recommendation says.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut parents = headers.get_all("traceparent").iter();
        let (parent, None) = (parents.next()?, parents.next()) else { return None };
        let (trace, span, flags) = parse(parent.to_str().ok()?)?;
        let states = headers.get_all("tracestate").iter().filter_map(|state| state.to_str().ok());
        let state = Some(states.collect::<Vec<_>>().join(",")).filter(|state| state.len() <= STATE_BYTES_MAX);
        Some(Self { trace, parent: Some(span), state: state.unwrap_or_default(), is_sampled: flags & 1 == 1 })
    }

    /// A trace that begins here.
    pub(super) fn begun(ids: &Ids) -> Self {
        let trace = (u128::from(ids.next()) << 64) | u128::from(ids.next());
        Self { trace, parent: None, state: String::new(), is_sampled: true }
    }
}

/// Trace, span and flags of `00-<32 digits>-<16 digits>-<2 digits>`; versions to come may have more behind it.
fn parse(text: &str) -> Option<(u128, u64, u8)> {
    let mut parts = text.split('-');
    let mut digits = |count: usize| {
        let part = parts.next()?;
        let is_lower_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        (part.len() == count && part.bytes().all(is_lower_hex)).then_some(part)
    };
    let (version, trace, span, flags) = (digits(2)?, digits(32)?, digits(16)?, digits(2)?);
    let has_more = parts.next().is_some();
    if version == "ff" || version == "00" && has_more {
        return None;
    }
    let trace = u128::from_str_radix(trace, 16).ok().filter(|trace| *trace != 0)?;
    let span = u64::from_str_radix(span, 16).ok().filter(|span| *span != 0)?;
    Some((trace, span, u8::from_str_radix(flags, 16).ok()?))
}

/// Ids of traces and spans: unpredictable enough never to meet another server's, without asking the system each time.
#[derive(Debug)]
pub(super) struct Ids(AtomicU64);

impl Ids {
    /// Begins somewhere at random.
    pub(super) fn new() -> Self {
        // Without randomness two servers' ids may meet: a trace would then show too much, nothing else.
        Self(AtomicU64::new(getrandom::u64().unwrap_or_default()))
    }

    /// The next id, not 0 (SplitMix64: every state gives another one).
    pub(super) fn next(&self) -> u64 {
        const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
        loop {
            let mut id = self.0.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
            id = (id ^ (id >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            id = (id ^ (id >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            id ^= id >> 31;
            if id != 0 {
                return id;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn of(headers: &[(&'static str, &str)]) -> Option<TraceContext> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap());
        }
        TraceContext::of(&map)
    }

    #[test]
    fn a_valid_parent_is_continued_with_its_state() {
        let context = of(&[("traceparent", VALID), ("tracestate", "a=1"), ("tracestate", "b=2")]).unwrap();
        assert_eq!(context.trace, 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c);
        assert_eq!(context.parent, Some(0xb7ad_6b71_6920_3331));
        assert_eq!((context.state.as_str(), context.is_sampled), ("a=1,b=2", true));
        assert!(!of(&[("traceparent", &VALID.replace("-01", "-02"))]).unwrap().is_sampled);
        let newer = format!("01{}-more", &VALID[2..]);
        assert!(of(&[("traceparent", &newer)]).is_some(), "a version to come");
        let long = "x".repeat(STATE_BYTES_MAX + 1);
        assert_eq!(of(&[("traceparent", VALID), ("tracestate", &long)]).unwrap().state, "");
    }

    #[test]
    fn what_is_not_valid_begins_a_trace() {
        for bad in [
            "",
            "00",
            &VALID.replace("00-", "ff-"),
            &VALID.to_uppercase(),
            &format!("{VALID}-more"),
            &VALID.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &VALID.replace("b7ad6b7169203331", &"0".repeat(16)),
            &VALID.replace("b7ad", "b7a"),
            &VALID.replace("b7ad", "+7ad"),
        ] {
            assert_eq!(of(&[("traceparent", bad)]), None, "{bad}");
        }
        assert_eq!(of(&[("traceparent", VALID), ("traceparent", VALID)]), None, "two of them");
        let ids = Ids::new();
        let (one, two) = (TraceContext::begun(&ids), TraceContext::begun(&ids));
        assert!(one.trace != two.trace && one.parent.is_none() && one.is_sampled);
    }
}
