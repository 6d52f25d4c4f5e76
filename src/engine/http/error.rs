//! Errors in vLLM's shapes, as captured from 0.32.

use http::StatusCode;

/// An error answer: a status and its JSON body.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct ApiError {
    pub status: StatusCode,
    pub body: String,
    /// Methods that the path would take, with 405.
    pub allow: Option<&'static str>,
}

impl ApiError {
    fn shaped(status: StatusCode, kind: &str, message: &str, param: Option<&str>) -> ApiError {
        let text = |value: &str| serde_json::Value::from(value).to_string();
        let body = format!(
            r#"{{"error":{{"message":{},"type":{},"param":{},"code":{}}}}}"#,
            text(message),
            text(kind),
            param.map_or("null".to_owned(), text),
            status.as_u16()
        );
        ApiError { status, body, allow: None }
    }

    /// A value that vLLM itself refuses; names the parameter and, if given, its value.
    pub fn parameter(name: &'static str, value: Option<String>, message: &str) -> ApiError {
        let value = value.map_or(String::new(), |value| format!(", value={value}"));
        let message = format!("{message} (parameter={name}{value})");
        Self::shaped(StatusCode::BAD_REQUEST, "BadRequestError", &message, Some(name))
    }

    /// A request that vLLM refuses without naming a parameter.
    pub fn bad_request(message: &str, param: Option<&str>) -> ApiError {
        Self::shaped(StatusCode::BAD_REQUEST, "BadRequestError", message, param)
    }

    /// What the schema refuses: `loc` is the place in the body, `rest` the other fields as they are printed.
    pub fn validation(kind: &str, loc: &str, rest: &str) -> ApiError {
        let message = format!("1 validation error:\n  {{'type': '{kind}', 'loc': '{loc}', {rest}}}");
        Self::shaped(StatusCode::BAD_REQUEST, "Bad Request", &message, Some(loc))
    }

    pub fn content_type() -> ApiError {
        let message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed";
        Self::shaped(StatusCode::BAD_REQUEST, "Bad Request", message, None)
    }

    pub fn unknown_model(asked: &str, served: &str) -> ApiError {
        let message = format!("The model `{asked}` does not exist. Valid aliases: {served}.");
        Self::shaped(StatusCode::NOT_FOUND, "NotFoundError", &message, Some("model"))
    }

    pub fn busy() -> ApiError {
        let message = "The engine is currently busy and cannot accept new requests. Please try again later or on a \
                       different instance.";
        Self::shaped(StatusCode::SERVICE_UNAVAILABLE, "Service Unavailable", message, None)
    }

    /// The worker task is gone.
    pub fn dead() -> ApiError {
        let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.";
        Self::shaped(StatusCode::INTERNAL_SERVER_ERROR, "InternalServerError", message, None)
    }

    fn detail(status: StatusCode, detail: &str) -> ApiError {
        ApiError { status, body: format!(r#"{{"detail":"{detail}"}}"#), allow: None }
    }

    pub fn not_found() -> ApiError {
        Self::detail(StatusCode::NOT_FOUND, "Not Found")
    }

    pub fn method_not_allowed(allow: &'static str) -> ApiError {
        ApiError { allow: Some(allow), ..Self::detail(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed") }
    }

    pub fn undecodable_body() -> ApiError {
        Self::detail(StatusCode::BAD_REQUEST, "There was an error parsing the body")
    }

    pub fn unauthorized() -> ApiError {
        let body = r#"{"error":"Unauthorized"}"#.to_owned();
        ApiError { status: StatusCode::UNAUTHORIZED, body, allow: None }
    }
}
