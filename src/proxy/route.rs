//! What kind of request it is, from its method and path alone: with a cache key, without one, or for the engine's operator
//! and so not for this port.

use http::Method;

use crate::core::prompt::Endpoint;
use crate::metrics;

/// The kind of a request.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Route {
    /// Its prompt is read and keys the workers' caches.
    Routed(Endpoint),
    /// Forwarded as it is, to the worker with the least to do.
    Plain,
    /// Controls the engine; refused.
    Blocked,
}

impl Route {
    pub fn of(method: &Method, path: &str) -> Route {
        if method == Method::POST {
            match path {
                "/v1/chat/completions" => return Route::Routed(Endpoint::Chat),
                "/v1/completions" => return Route::Routed(Endpoint::Completions),
                "/v1/responses" => return Route::Routed(Endpoint::Responses),
                "/v1/messages" => return Route::Routed(Endpoint::Messages),
                _ => {}
            }
        }
        if is_control(path) { Route::Blocked } else { Route::Plain }
    }

    pub fn label(self) -> metrics::Route {
        match self {
            Route::Routed(Endpoint::Chat) => metrics::Route::Chat,
            Route::Routed(Endpoint::Completions) => metrics::Route::Completions,
            Route::Routed(Endpoint::Responses) => metrics::Route::Responses,
            Route::Routed(Endpoint::Messages) => metrics::Route::Messages,
            Route::Plain => metrics::Route::Other,
            Route::Blocked => metrics::Route::Blocked,
        }
    }
}

/// Paths by which vLLM lets its operator put an engine to sleep, empty its cache, change its weights or adapters, or run code
/// in it. What lies below them is blocked too.
const CONTROL: &[&str] = &[
    "/abort_requests",
    "/collective_rpc",
    "/finish_weight_update",
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/is_paused",
    "/is_scaling_elastic_ep",
    "/is_sleeping",
    "/pause",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/server_info",
    "/sleep",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/update_weights",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/wake_up",
];

/// Whether any spelling that a server could take for a control path is in `path`.
fn is_control(path: &str) -> bool {
    let plain = normal(path);
    CONTROL.iter().any(|control| {
        plain.strip_prefix(control).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    })
}

/// The path as the most lenient server would read it: percent-decoded as often as it can be, without parameters after `;`,
/// empty and dotted segments resolved, in lower case.
fn normal(path: &str) -> String {
    let text = percent_decoded(path).to_ascii_lowercase();
    let mut segments: Vec<&str> = Vec::new();
    for segment in text.split(['/', '\\']) {
        match segment.split(';').next().unwrap_or("").trim() {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    format!("/{}", segments.join("/"))
}

/// Decoded until nothing is left to decode, in one pass: what a decoded byte completes is decoded at once, so that a path of
/// nested escapes costs no more than any other. Bytes that are no UTF-8 become the replacement character, which is in no path.
fn percent_decoded(text: &str) -> String {
    let mut decoded = Vec::with_capacity(text.len());
    for byte in text.bytes() {
        decoded.push(byte);
        while let [.., b'%', high, low] = decoded[..]
            && let (Some(high), Some(low)) = (hex(high), hex(low))
        {
            decoded.truncate(decoded.len() - 3);
            decoded.push(high << 4 | low);
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_decoded_however_deep_they_nest() {
        for (spelled, plain) in [
            ("/sleep", "/sleep"),
            ("/%73leep", "/sleep"),
            ("/%2573leep", "/sleep"),
            ("/%%373leep", "/sleep"),
            ("/%25%37%33leep", "/sleep"),
            ("/100%", "/100%"),
            ("/%zz%4", "/%zz%4"),
        ] {
            assert_eq!(percent_decoded(spelled), plain, "{spelled}");
        }
        // Sixty kilobytes that a pass per level would have to read thirty thousand times.
        let deep = format!("/%{}73leep", "25".repeat(30_000));
        assert_eq!(percent_decoded(&deep), "/sleep");
    }

    #[test]
    fn endpoints_with_a_prompt_are_routed_and_all_else_is_plain() {
        assert_eq!(Route::of(&Method::POST, "/v1/chat/completions"), Route::Routed(Endpoint::Chat));
        assert_eq!(Route::of(&Method::POST, "/v1/completions"), Route::Routed(Endpoint::Completions));
        assert_eq!(Route::of(&Method::OPTIONS, "/v1/chat/completions"), Route::Plain);
        for path in ["/v1/models", "/v1/embeddings", "/", "/v1/chat/completions/", "/sleeping-beauty", "*"] {
            assert_eq!(Route::of(&Method::POST, path), Route::Plain, "{path}");
        }
    }

    #[test]
    fn control_paths_are_blocked_in_every_spelling() {
        for path in [
            "/sleep",
            "/%73leep",
            "/%2573leep",
            "/v1/../sleep",
            "/v1/%2e%2e/sleep",
            "//sleep",
            "/./sleep",
            "/v1/chat/completions/../../../sleep",
            "/sleep;x",
            "/SLEEP",
            "/sleep/",
            "/sleep%20",
            "/v1\\..\\sleep",
            "/%5csleep",
            "/v1/load_lora_adapter",
            "/V1/%4Coad_lora_adapter",
            "/collective_rpc/anything",
        ] {
            assert_eq!(Route::of(&Method::POST, path), Route::Blocked, "{path}");
            assert_eq!(Route::of(&Method::GET, path), Route::Blocked, "{path}");
        }
    }

    #[test]
    fn decoding_ends_and_copes_with_stray_percents() {
        for path in ["/%", "/%2", "/%zz", "/%25%25%25", "/%ff%fe", "/a%"] {
            assert_eq!(Route::of(&Method::GET, path), Route::Plain, "{path}");
        }
    }
}
