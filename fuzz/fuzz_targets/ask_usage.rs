//! Bytes as a body that is made to ask for usage: where it is changed, it says the same but for that option, and it is changed
//! once only.
#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use warmroute::core::prompt::Endpoint;
use warmroute::proxy::ask_usage::ask_for_usage;

fuzz_target!(|body: &[u8]| {
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        let Some(changed) = ask_for_usage(endpoint, body) else { continue };
        assert_eq!(ask_for_usage(endpoint, &changed), None);
        let (Ok(mut before), Ok(mut after)) =
            (serde_json::from_slice::<Value>(body), serde_json::from_slice::<Value>(&changed))
        else {
            // Numbers beyond any float and lone surrogates, which are passed over unread.
            continue;
        };
        assert_eq!(before["stream"], true);
        assert_eq!(after["stream_options"]["include_usage"], true);
        if before["stream_options"].is_null() {
            before["stream_options"] = serde_json::json!({});
        }
        let (Some(asked), Some(given)) =
            (before["stream_options"].as_object_mut(), after["stream_options"].as_object_mut())
        else {
            panic!("options that are no object were changed");
        };
        let usage = asked.remove("include_usage").unwrap_or(Value::Null);
        assert!(usage == Value::Null || usage == false);
        given.remove("include_usage");
        if asked.get("continuous_usage_stats") == Some(&Value::Bool(true)) {
            asked.insert("continuous_usage_stats".to_owned(), Value::Bool(false));
        }
        assert_eq!(before, after);
    }
});
