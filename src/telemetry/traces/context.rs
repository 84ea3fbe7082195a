//! The W3C trace context in headers: converts text to a span context and back. It is stricter than the SDK's reader,
//! which accepts ids of any length. A context that cannot be read is ignored, and its task begins a new trace.

use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

/// The longest `tracestate`, in bytes, that is passed on to spans and replies. A longer one is dropped.
const MAX_TRACESTATE: usize = 1_024;

/// Reads a `traceparent` of any version, and its `tracestate` if that is valid.
pub(super) fn parse(traceparent: &str, tracestate: Option<&str>) -> Option<SpanContext> {
    let mut fields = traceparent.trim().split('-');
    let version = hex(fields.next()?, 2)?;
    let (trace, span) = (hex(fields.next()?, 32)?, hex(fields.next()?, 16)?);
    let flags = TraceFlags::new(hex(fields.next()?, 2)? as u8) & TraceFlags::SAMPLED;
    // Later versions may have more fields; ff is invalid.
    if version == 0xff || version == 0 && fields.next().is_some() {
        return None;
    }
    let state = tracestate.filter(|state| state.len() <= MAX_TRACESTATE);
    let state: TraceState = state.and_then(|state| state.parse().ok()).unwrap_or_default();
    let context = SpanContext::new(TraceId::from(trace), SpanId::from(span as u64), flags, true, state);
    context.is_valid().then_some(context)
}

/// The `traceparent` for the children of a span.
pub(super) fn traceparent(context: &SpanContext) -> String {
    let flags = context.trace_flags() & TraceFlags::SAMPLED;
    format!("00-{}-{}-{flags:02x}", context.trace_id(), context.span_id())
}

/// Reads a field of exactly `digits` lower-case hex digits.
fn hex(field: &str, digits: usize) -> Option<u128> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let is_number = field.len() == digits && field.bytes().all(is_digit);
    if is_number { u128::from_str_radix(field, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";

    #[test]
    fn a_context_is_written_as_it_was_read() {
        for flags in ["00", "01"] {
            let written = format!("00-{TRACE}-{SPAN}-{flags}");
            let context = parse(&written, Some("vendor=1,other=two")).unwrap();
            assert!(context.is_remote());
            assert_eq!(context.is_sampled(), flags == "01");
            assert_eq!(context.trace_state().header(), "vendor=1,other=two");
            assert_eq!(traceparent(&context), written);
        }
    }

    #[test]
    fn a_later_version_may_have_more_fields_and_is_continued_as_version_00() {
        let later = format!("cc-{TRACE}-{SPAN}-0b-what-the-future-brings");
        let context = parse(&later, None).unwrap();
        assert_eq!(traceparent(&context), format!("00-{TRACE}-{SPAN}-01"), "only the sampled flag is kept");
    }

    #[test]
    fn a_malformed_traceparent_is_no_context() {
        let zeros = "0".repeat(32);
        for written in [
            String::new(),
            "00-1-2-01".into(),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("00-{TRACE}-{SPAN}-01-"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("0-{TRACE}-{SPAN}-01"),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-+{}-{SPAN}-01", &TRACE[1..]),
            format!("00-{zeros}-{SPAN}-01"),
            format!("00-{TRACE}-{}-01", &zeros[..16]),
            format!("00-{TRACE}-{SPAN}-1"),
            format!("00-{TRACE}-{SPAN}-0é"),
        ] {
            assert_eq!(parse(&written, Some("a=b")), None, "{written}");
        }
    }

    #[test]
    fn a_tracestate_that_cannot_be_read_does_not_end_the_trace() {
        let long = format!("a={}", "b".repeat(MAX_TRACESTATE));
        for state in ["no equals sign", "UPPER=1", "", &long] {
            let context = parse(&format!("00-{TRACE}-{SPAN}-01"), Some(state)).unwrap();
            assert_eq!(context.trace_state().header(), "", "{state}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic_and_a_context_keeps_its_span(text in "\\PC{0,80}|[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.{0,4}") {
            if let Some(context) = parse(&text, Some(&text)) {
                prop_assert_eq!(parse(&traceparent(&context), None).unwrap().span_id(), context.span_id());
            }
        }
    }
}
